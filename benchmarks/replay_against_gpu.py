"""Is the simulator tied to a GPU? Live steps within budgets, against `replay` with measured rates.

    PYTHONPATH=src python benchmarks/replay_against_gpu.py [--format int4] [--pace 10GB] [--rounds 3] [--json FILE]

Made-up weights at Qwen1.5-MoE's shape, experts in page-locked memory, routing as nano recorded it. The rates come from
other routings, over three slots for each expert of a step: 0, 1, ... top_k of a layer's experts are new at every step,
the others always the same. A step in which every layer misses n takes layers · (layer + ask + n · block), which is
fitted over n (as counted: a few come back too early); ask is never taken as less than 0. A paced link, and each way of
bringing what is missing, has rates of its own. Points: three budgets, served by the host with and without a pace, and
read by the device itself.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steerpipe.bench.budgets import Ladder
from steerpipe.bench.options import DRIVERS
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing, open_routing
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.core.units import parse_bytes
from steerpipe.store.formats import parse_expert_format
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay

TRACE = Path(__file__).parent / "traces" / "nano-chat.safetensors"
SHARES = (0.125, 0.25, 0.5)
CONTEXT = 128
WARMUP, TOKENS = 96, 96  # of a point
SETTLE, STEPS = 16, 32  # of a rate


@dataclass(frozen=True)
class Way:
    """How a missing expert comes: who brings it, over what link."""

    driver: str
    pace: str | None

    def __str__(self) -> str:
        return f"{self.driver}, {self.pace or 'not paced'}"


@dataclass(frozen=True)
class Rates:
    """Seconds: a layer whose experts are all there, what a layer adds that misses any, and each block."""

    layer: float
    ask: float
    block: float


class Bench:
    """One shape on one device. Sources are opened over the same page-locked blocks."""

    def __init__(self, shape: Shape, routing: Routing, device: torch.device) -> None:
        self.shape, self.routing, self._device = shape, routing, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._rig = Rig(shape, device, dtype, sequences=1, tokens=CONTEXT + WARMUP + TOKENS + 1, kernels=True)
        self._ladder = Ladder(shape, device)
        self.link = self._ladder.measure_link()

    @contextmanager
    def _open(self, way: Way, slots: int) -> Iterator[CudaSource]:
        blocks = LayerBlocks(self.shape.moe.experts, self.shape.layout.form, self.shape.layout.block_bytes)
        layers = dict.fromkeys(self.shape.spec.moe_layers, blocks)
        pace = parse_bytes(way.pace) if way.pace else None
        with CudaSource(
            layers, self._ladder.backing, slots=slots, device=self._device, direct=DRIVERS[way.driver], pace=pace
        ) as source:
            yield source
        self._rig.forget()

    def rates(self, way: Way) -> Rates:
        layers, top_k = self.shape.layers, self.shape.moe.top_k
        spent = []  # per layer
        with self._open(way, 3 * layers * top_k) as source:
            for new in range(top_k + 1):
                steps, missed = self._steps(source, missing(self.shape, new, SETTLE + STEPS), SETTLE, STEPS)
                spent.append(statistics.median(steps) / layers)  # a step that finds what is there already is no median
                assert 0.8 * new <= missed / layers <= new, f"{missed} misses per step instead of {new} in each layer"
        block, base = np.polyfit(range(1, top_k + 1), spent[1:], 1)
        return Rates(spent[0], max(0.0, float(base) - spent[0]), float(block))

    def point(self, way: Way, share: float) -> tuple[float, float]:
        """Mean seconds per step after the warm-up, and the hit rate."""
        with self._open(way, slots_of_share(share, self.shape.all_experts)) as source:
            steps, missed = self._steps(source, self.routing, WARMUP, TOKENS)
        return statistics.fmean(steps), 1 - missed / (self.shape.layers * self.shape.moe.top_k)

    def replayed(self, rates: Rates, share: float) -> tuple[float, float]:
        """The same, on the machine that the rates make."""
        block_bytes = self.shape.layout.block_bytes
        machine = Machine(
            slots_of_share(share, self.shape.all_experts), block_bytes, block_bytes / rates.block, rates.layer,
            ask_seconds=rates.ask,
        )  # fmt: skip
        ids = self.routing.ids[: WARMUP + TOKENS]
        recording = Recording("live", ids, np.zeros(len(ids), dtype=np.int32), self.shape.moe.experts)
        report = replay(recording, machine, "lfru", warmup_tokens=WARMUP)
        return report.tpot_mean_seconds, report.hit_rate

    def _steps(self, source: CudaSource, routing: Routing, before: int, count: int) -> tuple[list[float], float]:
        """Seconds of `count` steps after `before` of them, and the misses of one step."""
        kv = self._rig.sequence(CONTEXT)
        try:
            last = CONTEXT + before + count - 1
            for length in sorted({CONTEXT, last, *(1 << n for n in range(12) if CONTEXT < 1 << n < last)}):
                self._rig.check(source, [kv], routing, length)  # captures the graph of that length
            kv.truncate(CONTEXT)
            self._rig.decode(source, [kv], routing, 0, before)
            begun = source.counters()
            steps = self._rig.decode(source, [kv], routing, before, count)
            return steps, (source.counters() - begun).misses / count
        finally:
            kv.free()


def missing(shape: Shape, new: int, tokens: int) -> Routing:
    """The last `new` of each layer's experts go round all that are not always chosen; the others stay."""
    kept, top_k = shape.moe.top_k - new, shape.moe.top_k
    round_ = np.arange(tokens)[:, None, None] * new + 7 * np.arange(shape.layers)[None, :, None] + np.arange(new)
    moving = kept + round_ % (shape.moe.experts - kept)  # [T, L, new]
    staying = np.broadcast_to(np.arange(kept), (tokens, shape.layers, kept))
    ids = np.concatenate([staying, moving], axis=2)
    assert ids.shape == (tokens, shape.layers, top_k), "a layer routes to top_k"
    return Routing(f"{new} new", ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--routing", default=str(TRACE))
    parser.add_argument("--format", default="int4")
    parser.add_argument("--pace", default="10GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = make_shape(given.shape, form, CONTEXT + WARMUP + TOKENS + 1)
    routing = open_routing(given.routing, shape, WARMUP + TOKENS)
    assert routing is not None, "routing is forced"
    bench = Bench(shape, routing, device)
    found: dict[str, Any] = {"shape": given.shape, "format": given.format, "link_bytes_per_second": bench.link}
    ways = [Way("served", None), Way("served", given.pace), Way("direct", None)]
    measure(bench, ways, given.rounds, found, given.json)


def measure(bench: Bench, ways: list[Way], rounds: int, found: dict[str, Any], file: Path | None) -> None:
    """Rates, then points, round after round; what is known so far is printed and kept after each."""
    rates: dict[Way, list[Rates]] = {way: [] for way in ways}
    lives: dict[tuple[Way, float], list[tuple[float, float]]] = {(way, share): [] for way in ways for share in SHARES}
    begin = time.perf_counter()
    for number in range(rounds):
        for way in ways:
            rates[way].append(bench.rates(way))
            for share in SHARES:
                lives[way, share].append(bench.point(way, share))
        print(f"round {number + 1}, {time.perf_counter() - begin:.0f} s", flush=True)
        found |= tell(bench, rates, lives)
        if file:
            file.write_text(json.dumps(found, indent=1) + "\n")


def tell(
    bench: Bench, rates: dict[Way, list[Rates]], lives: dict[tuple[Way, float], list[tuple[float, float]]]
) -> dict[str, Any]:
    medians, rows = {}, []
    for way, each in rates.items():
        medians[way] = Rates(*(statistics.median(getattr(r, name) for r in each) for name in ("layer", "ask", "block")))
        layer, ask, block = (seconds * 1e6 for seconds in asdict(medians[way]).values())
        print(f"{way}: layer {layer:.1f} us, ask {ask:.1f} us, block {block:.1f} us")
    for (way, share), runs in lives.items():
        spent = [seconds * 1e3 for seconds, _ in runs]
        measured, (seconds, hit) = statistics.median(spent), bench.replayed(medians[way], share)
        error = seconds * 1e3 / measured - 1
        rows.append({
            "way": str(way), "share": share, "live_ms": measured, "live_rounds_ms": spent, "replay_ms": seconds * 1e3,
            "error": error, "live_hit": runs[0][1], "replay_hit": hit,
        })  # fmt: skip
        print(
            f"{way}, {share:.1%}: hit {runs[0][1]:.1%} ({hit:.1%}), live {measured:.3f} ({min(spent):.3f} to "
            f"{max(spent):.3f}), replay {seconds * 1e3:.3f} ms, {error:+.1%}",
            flush=True,
        )
    return {"rates": {str(way): asdict(each) for way, each in medians.items()}, "points": rows}


if __name__ == "__main__":
    main()
