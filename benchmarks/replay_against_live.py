"""Is the simulator tied to reality? Live time per token under budgets, against `replay` with measured rates.

    python benchmarks/replay_against_live.py [--pack FOLDER | --large] [--tokens 160] [--repeats 3]

One process, one torch thread, medians over rounds. A round measures a step with every expert in a slot, one expert's
product, with two slots and an unpaced link what a miss costs (the stall: read, check, decode, wake-up; and the
engine thread's own work beside it), and how long each link really takes for a block: a paced one sleeps longer than
it is told to. Own work runs while a paced link sleeps, but not while the reader computes (they share the
interpreter's lock), so a block takes the stall plus the longer of link and own work. Then each of six points runs
live with its routing recorded, and the recording is replayed on a machine made of those figures. Without --pack a
random model of nano's shape is used: its routing is degenerate, which matters to neither side, since both see the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from steerpipe import Pipeline
from steerpipe.core.events import RoutingRecord
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.moe import expert_ffn
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.store.reader import open_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.machine import Machine
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
LARGE_PACES = {"40MB": "400MB", "150MB": "1500MB", None: None}
POINTS = [("12.5%", "40MB"), ("25%", "40MB"), ("50%", "40MB"), ("25%", "150MB"), ("12.5%", None), ("25%", None)]
ALL = "100%"  # every expert in a slot: the ladder's own work counts, as it does under a budget
WARMUP = 48  # tokens after which a step is measured, live and replayed


class Recorder:
    """Keeps the routing of decode steps: [layers, top_k] per token."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray[Any, Any]]] = []

    def observe(self, record: RoutingRecord) -> None:
        if len(record.positions) == 1:
            if record.layer == 0:
                self.rows.append([])
            self.rows[-1].append(record.experts[0])


def live(pack: Path, tokens: int, **budget: Any) -> tuple[float, Recorder, Any]:
    """Median seconds per token after the warm-up, the routing, and what the ladder did meanwhile."""
    recorder = Recorder()
    with Pipeline(pack, dtype="float32", threads=1, profile=False, sink=recorder, **budget) as pipe:
        if budget.get("fast_memory") == ALL:
            pipe.experts.warm(pipe.experts.experts)
            pipe.experts.check_integrity()  # waits until nothing moves
        prompt = [5 + 31 * i % 8000 for i in range(8)]
        stamps, before = [], None
        for event in pipe.stream(prompt, temperature=1.0, seed=3, max_tokens=tokens, ignore_eos=True):
            stamps.append(time.perf_counter())
            if len(stamps) == WARMUP:
                before = pipe.counters()
            assert event is not None
        after = pipe.counters()
    spent = (stamps[-1] - stamps[WARMUP - 1]) / (len(stamps) - WARMUP)
    return spent, recorder, None if after is None or before is None else after - before


def expert_seconds(pack: Path) -> float:
    """One expert's product on one row: median."""
    opened = open_pack(pack)
    some = range(min(32, opened.spec.moe(0).experts))
    weights = [opened.decode_block(0, opened.read_block(0, expert), torch.float32) for expert in some]
    x = torch.randn(1, opened.spec.hidden)
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        for each in weights:
            expert_ffn(x, each)
        times.append((time.perf_counter() - begun) / len(weights))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path)
    parser.add_argument(
        "--large", action="store_true", help="a random model with blocks of 1.2 MB, at ten times the rates"
    )
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pack = given.pack or Path(scratch) / "pack"
        if given.large:
            POINTS[:] = [(share, LARGE_PACES[pace]) for share, pace in POINTS]
        if given.pack is None:
            write_tiny("qwen2_moe", Path(scratch) / "model", **(LARGE if given.large else NANO))
            options = PackOptions(parse_expert_format("int8" if given.large else "int4"))
            write_pack(open_checkpoint(Path(scratch) / "model"), pack, options)
        print(json.dumps(measure(pack, given.tokens, given.repeats)))


@dataclass(frozen=True)
class Round:
    """Everything once, one after the other, so that a slow minute of the machine falls on both sides alike."""

    resident: float  # seconds per token
    one_expert: float
    stall: float  # per miss, two slots, unpaced
    handling: float  # the engine thread's own work per miss
    read: dict[str | None, float]  # seconds with a read outstanding per block, by pace
    points: list[tuple[float, Recorder, Any]]  # live, as POINTS


def one_round(pack: Path, tokens: int) -> Round:
    resident, _, _ = live(pack, tokens, fast_memory=ALL)
    read: dict[str | None, float] = {}
    stall = handling = 0.0
    for pace in dict.fromkeys(pace for _, pace in POINTS):
        spent, _, counted = live(pack, tokens, fast_memory="0.01%", pace=pace)
        read[pace] = counted.link_seconds / counted.link_reads
        if pace is None:
            stall = counted.stall_seconds / counted.misses
            handling = (spent - resident) * (tokens - WARMUP) / counted.misses - stall
    points = [live(pack, tokens, fast_memory=share, pace=pace) for share, pace in POINTS]
    return Round(resident, expert_seconds(pack), stall, handling, read, points)


def measure(pack: Path, tokens: int, repeats: int) -> dict[str, Any]:
    opened = open_pack(pack)
    layers, moe = opened.spec.moe_layers, opened.spec.moe(opened.spec.moe_layers[0])
    block = opened.layout(layers[0]).block_bytes
    rounds = [one_round(pack, tokens) for _ in range(repeats)]

    def median(figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(each) for each in rounds)

    resident, one_expert = median(lambda r: r.resident), median(lambda r: r.one_expert)
    stall, handling = median(lambda r: r.stall), median(lambda r: r.handling)
    read = {pace: median(lambda r, pace=pace: r.read[pace]) for pace in rounds[0].read}
    missed = f"{stall * 1e6:.0f} + {handling * 1e6:.0f} us"
    print(f"resident {resident * 1e3:.2f} ms · one expert {one_expert * 1e6:.0f} us · one miss {missed}")
    print("one block on the link: " + ", ".join(f"{pace or 'unpaced'} {us * 1e6:.0f} us" for pace, us in read.items()))
    rows = []
    for number, (share, pace) in enumerate(POINTS):
        spent = median(lambda r, number=number: r.points[number][0])
        _, recorder, counted = rounds[0].points[number]  # the same tokens in every round
        routing = np.array(recorder.rows, dtype=np.int64)  # [tokens, layers, top_k]
        recording = Recording("live", routing, np.zeros(len(routing), dtype=np.int32), moe.experts)
        machine = Machine(
            slots=int(float(share[:-1]) / 100 * len(layers) * moe.experts), block_bytes=block,
            link_bytes_per_second=block / max(read[pace], handling),
            layer_seconds=resident / len(layers) - moe.top_k * one_expert,
            expert_seconds=one_expert, latency_seconds=stall,
        )  # fmt: skip
        predicted = replay(recording, machine, "lfru", warmup_tokens=WARMUP).tpot_mean_seconds
        hit, error = counted.hits / counted.leased, predicted / spent - 1
        rows.append({"share": share, "pace": pace, "live_ms": spent * 1e3, "replay_ms": predicted * 1e3, "hit": hit})
        figures = f"live {spent * 1e3:7.2f}  replay {predicted * 1e3:7.2f}  {error:+.1%}"
        print(f"{share:>6} {pace or 'unpaced':>8}  hit {hit:.0%}  {figures}")
    return {
        "resident_ms": resident * 1e3,
        "expert_us": one_expert * 1e6,
        "miss_us": stall * 1e6,
        "handling_us": handling * 1e6,
        "read_us": {pace or "unpaced": seconds * 1e6 for pace, seconds in read.items()},
        "points": rows,
    }


if __name__ == "__main__":
    main()
