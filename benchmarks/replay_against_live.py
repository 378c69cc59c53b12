"""Is the simulator tied to reality? Live time per token under budgets, against `replay` with measured rates.

    python benchmarks/replay_against_live.py [--pack FOLDER | --large] [--tokens 96] [--repeats 3] [--json FILE]

One process, one torch thread; median tokens, and of interleaved rounds the median. A round measures the rates (a step
with every expert in a slot; `ladder_rates` has the rest, and knows no engine), then runs six points live with their
routing recorded. The recording is replayed on a machine made of those rates, and of nothing else. Without --pack a
random model of nano's shape is used: its routing is degenerate, which matters to neither side, since both see the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from ladder_rates import LayerRates, MissRates, Pieces
from transformers.utils import logging

from steerpipe import Pipeline
from steerpipe.core.events import RoutingRecord
from steerpipe.core.units import parse_bytes
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.machine import Decoding, Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay

NANO: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 24, "num_attention_heads": 3,
    "num_key_value_heads": 3, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 192, "mlp_only_layers": [], "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
LARGE = NANO | {  # blocks of 1.2 MB in int8: what a link is for; nano's are 16 KiB
    "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 12,
    "num_experts": 24, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 768,
}  # fmt: skip
SHARES = (0.125, 0.25, 0.5)
WARMUP = 40  # tokens after which a step is measured, live and replayed

Pace = str | None


class Recorder:
    """Keeps the routing of decode steps: [layers, top_k] per token."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray[Any, Any]]] = []

    def observe(self, record: RoutingRecord) -> None:
        if len(record.positions) == 1:
            if record.layer == 0:
                self.rows.append([])
            self.rows[-1].append(record.experts[0])


@dataclass(frozen=True)
class Live:
    """One run of the product."""

    seconds: float  # per token after the warm-up: median
    hit_rate: float
    routing: np.ndarray[Any, Any]  # [tokens, layers, top_k]


def live(pack: Path, tokens: int, share: float, pace: Pace) -> Live:
    recorder = Recorder()
    with Pipeline(
        pack, dtype="float32", threads=1, profile=False, sink=recorder, fast_memory=f"{share:%}", pace=pace,
        policy="lfru", predict="off",
    ) as pipe:  # fmt: skip
        if share == 1:  # every expert in a slot: the ladder's own work counts, as it does under a budget
            pipe.experts.warm(pipe.experts.experts)
            pipe.experts.check_integrity()  # waits until nothing moves
        prompt = [5 + 31 * i % 8000 for i in range(8)]
        stamps, before = [], None
        for _ in pipe.stream(prompt, temperature=1.0, seed=3, max_tokens=tokens, ignore_eos=True):
            stamps.append(time.perf_counter())
            if len(stamps) == WARMUP:
                before = pipe.counters()
        after = pipe.counters()
    assert before is not None and after is not None, "the run was shorter than its warm-up"
    counted = after - before
    spent = np.diff(stamps[WARMUP - 1 :])
    return Live(float(np.median(spent)), counted.hits / counted.leased, np.array(recorder.rows, dtype=np.int64))


@dataclass(frozen=True)
class Rates:
    """All that the machine is made of."""

    resident: float  # seconds per token with every expert in a slot
    layer: LayerRates
    misses: dict[Pace, MissRates]
    shared: float  # seconds per layer of the shared expert, which runs while what is missing is read

    @classmethod
    def median(cls, each: "list[Rates]") -> "Rates":
        misses = {pace: _median([rates.misses[pace] for rates in each]) for pace in each[0].misses}
        resident, shared = (
            statistics.median(values) for values in zip(*((r.resident, r.shared) for r in each), strict=True)
        )
        return cls(resident, _median([r.layer for r in each]), misses, shared)

    def machine(self, pieces: Pieces, share: float, pace: Pace) -> Machine:
        layers, missed = len(pieces.layers), self.misses[pace]
        return Machine(
            slots=slots_of_share(share, layers * pieces.moe.experts),
            block_bytes=pieces.block_bytes,
            link_bytes_per_second=pieces.block_bytes / missed.read,
            layer_seconds=self.resident / layers - pieces.moe.top_k * self.layer.expert - self.shared,
            beside_seconds=self.shared,
            expert_seconds=self.layer.expert,
            ask_seconds=missed.ask,
            decoding=Decoding(missed.decode),
        )

    def __str__(self) -> str:
        one = self.layer.expert * 1e6
        beside = f"one more expert {one:.0f} us, shared expert {self.shared * 1e6:.0f} us"
        lines = [f"a step with all experts in slots {self.resident * 1e3:.2f} ms; {beside}"]
        for pace, each in self.misses.items():
            ask, read, decode = (seconds * 1e6 for seconds in asdict(each).values())
            lines.append(
                f"{pace or 'unpaced':>8}: ask {ask:.0f} us, then per block read {read:.0f}, decode {decode:.0f}"
            )
        return "\n".join(lines)


RatesT = TypeVar("RatesT", LayerRates, MissRates)


def _median(each: list[RatesT]) -> RatesT:
    """Of each figure."""
    return type(each[0])(
        **{field.name: statistics.median(getattr(rates, field.name) for rates in each) for field in fields(each[0])}
    )


@dataclass(frozen=True)
class Round:
    """Everything once, one after the other, so that a slow minute of the machine falls on both sides alike."""

    rates: Rates
    points: list[Live]


def one_round(pack: Path, pieces: Pieces, tokens: int, points: list[tuple[float, Pace]]) -> Round:
    resident, layer = live(pack, tokens, 1.0, None).seconds, pieces.layer_rates()
    paces = dict.fromkeys(pace for _, pace in points)
    misses = {pace: pieces.miss_rates(parse_bytes(pace) if pace else None, layer) for pace in paces}
    rates = Rates(resident, layer, misses, pieces.shared_seconds())
    return Round(rates, [live(pack, tokens, *point) for point in points])


def compare(pieces: Pieces, rounds: list[Round], points: list[tuple[float, Pace]]) -> dict[str, Any]:
    """Prints the table; returns what it was made of."""
    rates = Rates.median([each.rates for each in rounds])
    print(rates)
    rows = []
    for number, (share, pace) in enumerate(points):
        runs = [each.points[number] for each in rounds]
        spent = [run.seconds * 1e3 for run in runs]
        routing = runs[0].routing  # the same tokens in every round
        recording = Recording("live", routing, np.zeros(len(routing), dtype=np.int32), pieces.moe.experts)
        machine = rates.machine(pieces, share, pace)
        report = replay(recording, machine, "lfru", warmup_tokens=WARMUP - 1)  # the first token is the prompt's
        replayed, measured = report.tpot_median_seconds * 1e3, statistics.median(spent)
        rows.append({
            "share": share, "pace": pace, "live_ms": measured, "live_rounds_ms": spent, "replay_ms": replayed,
            "error": replayed / measured - 1, "live_hit": runs[0].hit_rate, "replay_hit": report.hit_rate,
        })  # fmt: skip
        print(
            f"{share:>6.1%} {pace or 'unpaced':>8}  hit {runs[0].hit_rate:.0%} ({report.hit_rate:.0%})  "
            f"live {measured:6.2f} ({min(spent):.2f} to {max(spent):.2f})  replay {replayed:6.2f}  "
            f"{replayed / measured - 1:+.1%}"
        )
    figures = asdict(rates) | {"misses": {pace or "unpaced": asdict(each) for pace, each in rates.misses.items()}}
    return {"rates_seconds": figures, "rounds": len(rounds), "points": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--large", action="store_true", help="a random model with blocks of 1.2 MB")
    parser.add_argument("--pace", help="of the paced points; default: 40MB, with --large 400MB")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    points = [(share, pace) for pace in (given.pace or ("400MB" if given.large else "40MB"), None) for share in SHARES]
    with tempfile.TemporaryDirectory() as scratch:
        pack = given.pack or random_pack(Path(scratch), large=given.large)
        pieces = Pieces(pack)
        rounds = [one_round(pack, pieces, given.tokens, points) for _ in range(given.repeats)]
        found = compare(pieces, rounds, points)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def random_pack(scratch: Path, *, large: bool) -> Path:
    write_tiny("qwen2_moe", scratch / "model", **(LARGE if large else NANO))
    options = PackOptions(parse_expert_format("int8" if large else "int4"))
    write_pack(open_checkpoint(scratch / "model"), scratch / "pack", options)
    return scratch / "pack"


if __name__ == "__main__":
    main()
