"""What prediction is worth on a GPU at full shape: live steps with recorded routing and forecasts, beside `replay`.

    PYTHONPATH=src:. python benchmarks/predict_on_gpu.py --forecasts FILE [--format int4] --json FILE
    PYTHONPATH=src:. python benchmarks/predict_shares.py --forecasts FILE --json FILE   # adds replay, anywhere

The forecasts are written by record_forecasts.py. Every row decodes the same tokens over the same page-locked blocks;
the arithmetic of a predictor and of a reuse forecast runs at its taps with made-up weights, and the answers are the
recorded ones. The machine that `replay` gets is measured first, on other routings (`rates`), once for all rows, with
the driver of the run: direct (the device reads and sends for experts by itself), or served by the host. Link
utilisation is bytes moved over the link's measured rate. No row begins after `--seconds`: the rates that a profiler
tells come last, and without them nothing is compared.
"""

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.predict_parts import Log, rows_of, runs_of
from benchmarks.predict_rates import history_delay, measure_rates, profile_rates
from benchmarks.predict_rows import HISTORY, ROWS, Row, asked_history, digest, said_of
from benchmarks.predict_spans import timed_replays
from benchmarks.reuse_parts import Heard, made_up_reuse
from steerpipe.bench.budgets import Ladder
from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.bench.prediction import belady, made_up_forecaster, made_up_network, spoken
from steerpipe.bench.residents import ResidentBlocks
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing, never_again
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.model.gpu.reuse import ReuseBranch
from steerpipe.store.formats import parse_expert_format
from steerpipe.store.policies import Policy
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.machine import slots_of_share
from steerpipe.transfer.recorded import Recording

CONTEXT = 128
LENGTHS = 1 + 2  # steps that capture graphs before the first token counts


class Bench:
    """One shape on one device; sources are opened over the same page-locked blocks."""

    def __init__(self, shape: Shape, file: ForecastFile, given: argparse.Namespace) -> None:
        self.shape, self.file, self.given = shape, file, given
        self.device = torch.device("cuda")
        self.rig = Rig(shape, self.device, torch.bfloat16, sequences=1, tokens=1024, kernels=True)
        self.ladder = Ladder(shape, self.device)
        self.link = self.ladder.measure_link()
        self.graphs: list[float] = []
        self.blocks = LayerBlocks(shape.moe.experts, shape.layout.form, shape.layout.block_bytes)

    @property
    def history(self) -> str | None:
        """Whose questions a row of the run asks: else what that costs is not measured, nor can it fail."""
        given = self.given
        rows = [*rows_of(given.rows), *(rows_of(given.round_rows) if given.rounds else ())]
        return asked_history(rows, given.driver)

    @contextmanager
    def open(self, slots: int, policy: Policy | str = "lfru", *, served: bool = False) -> Iterator[CudaSource]:
        layers = dict.fromkeys(self.shape.spec.moe_layers, self.blocks)
        with CudaSource(
            layers, self.ladder.backing, slots=slots, device=self.device, policy=policy,
            direct=not served and self.given.driver == "direct",
            chunk_bytes=self.given.chunk << 10, window=self.given.window,
        ) as source:  # fmt: skip
            yield source
        self.rig.forget()

    def steps(self, source: Any, routing: Routing, before: int, count: int) -> tuple[list[float], dict[str, float]]:
        """Seconds of `count` steps after `before` of them, and what the source did in one step.

        `graphs` has the seconds of their graphs afterwards, by the device's clock.
        """
        kv = self.rig.sequence(CONTEXT)
        try:
            for length in (CONTEXT, CONTEXT + 1, CONTEXT + before + count):
                self.rig.check(source, [kv], routing, length)
            kv.truncate(CONTEXT)
            self.rig.decode(source, [kv], routing, 0, before)
            begun = source.counters() if hasattr(source, "counters") else None
            with timed_replays() as replays:
                steps = self.rig.decode(source, [kv], routing, before, count)
            torch.cuda.synchronize()
            self.graphs = [begin.elapsed_time(end) / 1e3 for begin, end in replays]
            if begun is None:
                return steps, {}
            spent = source.counters() - begun
            return steps, {
                "misses": spent.misses / count, "late": spent.prefetch.late / count,
                "guessed_hits": spent.prefetch.hits / count, "hits": spent.demand.hits / count,
                "demand_mb": spent.demand.read_bytes / count / 1e6, "guess_mb": spent.prefetch.read_bytes / count / 1e6,
                "cut": spent.prefetch.cancelled / count, "cut_mb": spent.prefetch.cancelled_bytes / count / 1e6,
            }  # fmt: skip
        finally:
            kv.free()

    def resident(self) -> float:
        """Seconds of a step with all experts on the device."""
        source = ResidentBlocks(self.shape, self.device)
        steps, _ = self.steps(source, self.routing, 16, self.given.tokens)
        source.close()
        self.rig.forget()
        return statistics.fmean(steps)

    @property
    def routing(self) -> Routing:
        return Routing("recorded", self.recording.routing)

    @property
    def recording(self) -> Recording:
        whole, count = self.file.recording, self.given.warmup + self.given.tokens
        return Recording(whole.name, whole.routing[:count], whole.sequence[:count], whole.experts)

    def policy(self, name: str) -> Policy | str:
        if name == "belady":
            return belady(self.recording, LENGTHS)
        if name == "reuse":
            assert self.file.reuse is not None, "the file has no reuse scores"
            return Heard(self.recording, self.file.reuse, LENGTHS)
        return name

    def listen(self, policy: Policy | str) -> None:
        """Where it hears a reuse forecast, that runs as a branch of the steps to come."""
        if isinstance(policy, Heard):
            assert self.file.reuse is not None, "the file has no reuse scores"
            taps = tuple(sorted({layer for _, layer in self.file.reuse.scores}))
            policy.branch = ReuseBranch(made_up_reuse(self.shape, taps, self.device), self.device, policy)
            self.rig.decoder.reuse = policy.branch  # type: ignore[union-attr]

    def forecaster(self, row: Row) -> Any:
        if row.arithmetic in HISTORY:
            return made_up_network(self.shape, row.arithmetic, self.device, served=row.served)
        return made_up_forecaster(
            self.shape, row.arithmetic, row.horizon, torch.bfloat16, self.device, served=row.served
        )  # fmt: skip

    def live(self, row: Row, share: float) -> dict[str, Any]:
        slots, policy = slots_of_share(share, self.shape.all_experts), self.policy(row.policy)
        with self.open(slots, policy, served=row.served and not row.said) as source:
            self.listen(policy)
            if (said := said_of(row, self.file)) is not None:
                forecaster = self.forecaster(row)
                self.rig.predict(forecaster, spoken(said, self.file.recording))
            steps, found = self.steps(source, self.routing, self.given.warmup, self.given.tokens)
            if row.said:
                found["throttled"] = float(source.throttled)
            if row.arithmetic == "transformers":
                found |= {f"questions_{key}": float(each) for key, each in asdict(forecaster.questions).items()}
            source.check_integrity()
        if isinstance(policy, Heard):
            found["heard"] = policy.heard / (LENGTHS + self.given.warmup + self.given.tokens)
        moved = (found["demand_mb"] + found["guess_mb"]) * 1e6
        mean = statistics.fmean(steps)
        return found | {
            "graph_ms": statistics.fmean(self.graphs) * 1e3, "graphs_us": [round(each * 1e6) for each in self.graphs],
            "live_ms": mean * 1e3, "median_ms": statistics.median(steps) * 1e3,
            "steps_us": [round(each * 1e6) for each in steps],
            "moved_mb": moved / 1e6, "link_utilisation": moved / self.link / mean,
        }  # fmt: skip

    def no_cache(self, rounds: int = 3) -> dict[str, Any]:
        """The seeds' own comparison: nothing stays; on demand, against what was named one layer before, committed.

        As of rows the mean over tokens of the median over rounds, for a host that is held up for a few steps; the floor
        is the median of what the link gives before each round: it changes within a minute by what is to be shown.
        """
        count, top_k = self.given.tokens, self.shape.moe.top_k
        routing = never_again(self.shape, LENGTHS + self.given.warmup + count)
        everything = Recording("none", routing.ids, np.zeros(len(routing.ids), dtype=np.int32), self.shape.moe.experts)
        floors, spent, found = list[float](), defaultdict[str, list[list[float]]](list), dict[str, Any]()
        for _ in range(rounds):
            floors.append(self.shape.routed_bytes / self.ladder.measure_link() * 1e3)
            for name, arithmetic, commit in (("on demand", "", False), ("lookahead, committed", "lookahead", True)):
                with self.open(4 * top_k, served=True) as source:
                    if arithmetic:
                        forecaster = made_up_forecaster(
                            self.shape, arithmetic, 1, torch.bfloat16, self.device, commit=commit
                        )
                        perfect = ForecastFile(everything, {}, None).foresight("perfect", 1)
                        self.rig.predict(forecaster, spoken(perfect, everything))
                    steps, counts = self.steps(source, routing, 16, count)
                spent[name].append([each * 1e3 for each in steps])
                found[f"{name}, misses"] = counts["misses"]
        means = {name: [statistics.fmean(each) for each in every] for name, every in spent.items()}
        by_tokens = {
            name: statistics.fmean(map(statistics.median, zip(*every, strict=True))) for name, every in spent.items()
        }
        return found | by_tokens | {"copy floor": statistics.median(floors), "rounds": means | {"copy floor": floors}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--format", default="int4", help="bf16, int8 or int4")
    parser.add_argument("--shares", default="0.125,0.25,0.5")
    parser.add_argument("--rows", default=",".join(map(str, range(len(ROWS)))), help="numbers of rows, by commas")
    parser.add_argument("--rounds", type=int, default=0, help="of the rows below, one after the other")
    parser.add_argument("--round-rows", default="1,10,15,11", help="LFRU, always wrong, LFRU again, chance")
    parser.add_argument("--round-shares", default="0.25,0.5")
    parser.add_argument("--driver", default="direct", choices=("direct", "served"))
    parser.add_argument("--skip-no-cache", action="store_true", help="leaves the seeds' own comparison out")
    parser.add_argument("--warmup", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chunks", default="4608x1", help="KiB of a guess at once x how many on the stream")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further row begins")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    shape = make_shape(given.shape, form, 1024)
    log = Log(
        given.json, format=given.format, driver=given.driver, tokens=given.tokens, warmup=given.warmup,
        block_bytes=shape.layout.block_bytes, forecasts=digest(given.forecasts),
    )  # fmt: skip
    measure(Bench(shape, read_forecasts(given.forecasts, shape.moe.experts), given), log)


def measure(bench: Bench, log: Log) -> None:
    """Resident steps, rates, the seeds' comparison, rows while there is time, and what a profiler tells."""
    given = bench.given
    chunks = [tuple(map(int, each.split("x"))) for each in given.chunks.split(",")]
    given.chunk, given.window = chunks[0]
    log.add("link", bench.link)
    log.add("chunk_kib", given.chunk)
    log.add("window", given.window)
    bench.resident()  # clocks and caches are warm afterwards
    log.add("resident_ms", bench.resident() * 1e3)
    rates = measure_rates(bench, log)
    log.add("rates", asdict(rates))
    if not given.skip_no_cache:
        log.add("no_cache", bench.no_cache())
    for chunk, window in chunks if len(chunks) > 1 else []:
        given.chunk, given.window = chunk, window
        spent = [bench.live(ROWS[4], 0.25)["live_ms"] for _ in range(2)]
        log.add(f"chunks of {chunk} KiB x {window}", spent)
    given.chunk, given.window = chunks[0]
    runs = list(runs_of(given))
    for done, (row, share, number) in enumerate(runs):
        if log.seconds() >= given.seconds:
            log.add("not_begun", len(runs) - done)
            break
        log.add_line({"row": row.name, "share": share, "round": number} | bench.live(row, share))
    rates = profile_rates(bench, log, rates)
    log.add("rates", asdict(rates))
    if bench.history:
        log.add("beside_delay", history_delay(bench, log, rates))


if __name__ == "__main__":
    main()
