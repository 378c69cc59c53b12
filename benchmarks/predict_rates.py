"""Parts of predict_on_gpu.py: the rates that `replay` is given, measured by themselves: no guess is sent meanwhile.

`measure_rates` comes before the rows, `profile_rates` after them: a profiler slows down what comes after it.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.predict_parts import Log, missing
from benchmarks.predict_rows import Rates
from benchmarks.predict_spans import (
    COPY,
    Kernel,
    end_of_step,
    fetch_rate,
    kernels_of,
    median_after,
    median_step,
)
from steerpipe.bench.forecasts import NAMED
from steerpipe.bench.prediction import made_up_forecaster, made_up_network
from steerpipe.bench.routing import Routing
from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.fetch import chunk_for
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.throttle import Throttle

if TYPE_CHECKING:
    from benchmarks.predict_on_gpu import Bench

SETTLE, STEPS, ROUNDS = 16, 32, 3  # of a rate
PLAIN, TAPPED, HISTORY = range(3)  # who predicts meanwhile


def measure_rates(bench: "Bench", log: Log) -> Rates:
    """Layers with no to k misses, plain and with a tap that names nobody, the host between two steps, and `fetch`."""
    plain, tapped, history = points(bench)
    log.add("points", [asdict(each) for each in plain])
    log.add("tapped_points", [asdict(each) for each in tapped])
    if bench.history:
        log.add("beside_of", bench.history)
        log.add("beside_points", [asdict(each) for each in history])
        log.add("beside", asdict(rates_of(plain, history, bench.shape.layers)))
    views = [bench.ladder.backing.view(number) for number in range(GUESSES)]
    rate = fetch_rate(views, bench.shape.layout.block_bytes, chunk_for(bench.shape.layout.form))
    return replace(rates_of(plain, tapped, bench.shape.layers), guess_bytes_per_second=rate)


def rates_of(plain: Sequence["Point"], tapped: Sequence["Point"], layers: int) -> Rates:
    """A layer is timed on the device, by the quickest of its rounds: whatever else runs makes it slower and never
    quicker. Of the host, whose speed changes within a run, the median of all points is taken.
    """
    between = statistics.median(each.host for each in plain)
    without, with_tap = _quickest(plain), _quickest(tapped)
    hits = (without[0] + between) / layers
    missing = sorted(set(without) - {0})
    block, base = np.polyfit(missing, [(without[each] + between) / layers for each in missing], 1)
    extra = float(base) - hits
    tap = max(0.0, (with_tap[0] - without[0]) / layers)
    return Rates(
        hits, max(0.0, -extra), max(0.0, extra), float(block), tap=tap,
        tap_more=tuple((with_tap[each] - without[each]) / layers - tap for each in missing),
        between=between,
        host=statistics.median(more.host - less.host for less, more in zip(plain, tapped, strict=True)),
    )  # fmt: skip


def _quickest(points: Sequence["Point"]) -> dict[int, float]:
    """Seconds of a graph, by what is missing."""
    return {
        misses: min(each.graph for each in points if each.misses == misses) for misses in {p.misses for p in points}
    }


def profile_rates(bench: "Bench", log: Log, rates: Rates) -> Rates:
    """What a step that hits is made of. Profiled it is longer: its parts are shares of it."""
    hits, taps = kernels(bench, 0, PLAIN), kernels(bench, 0, TAPPED)
    step = log.add("profiled step", median_step(hits, bench.shape.layers))
    scale = _scale(bench, rates, step)
    one = kernels(bench, 1, TAPPED)
    log.add("delay where one is missing", scale * _delay(one))
    copied = kernels(bench, 1, PLAIN)
    return replace(
        rates,
        tail=median_after(copied, COPY, "_combine") if any(each.name == COPY for each in copied) else None,
        end=scale * end_of_step(hits, bench.shape.layers),
        delay=scale * _delay(taps),
        experts=scale * median_after(hits, "_route", "_combine"),
    )


def history_delay(bench: "Bench", log: Log, rates: Rates) -> float:
    """Seconds from a router until what a network of history says can be sent for; behind `profile_rates`.

    Inside the graph it is said as soon as the layer's router has decided. Beside a step that hits, an answer may come
    after the next router: it would be taken for a quick one.
    """
    new = 0 if bench.history == "history" else 1
    return _scale(bench, rates, log.found["profiled step"]) * _delay(kernels(bench, new, HISTORY))


def _scale(bench: "Bench", rates: Rates, step: float) -> float:
    """Of a profiled step's parts to those of one that nobody profiles."""
    return (rates.layer * bench.shape.layers - rates.between) / step


def _delay(kernels: list[Kernel]) -> float:
    """Seconds from a router until what its tap says can be sent for: by `fetch`, or by a host that has heard it."""
    direct = any(each.name == "_fetch" for each in kernels)
    return median_after(kernels, "_route", "_fetch" if direct else "_foretell", begins=direct)


@contextmanager
def known(bench: "Bench", new: int, kind: int) -> Iterator[tuple[CudaSource, Routing]]:
    """A source and a routing of which `new` experts are missing in every layer; `kind`: TAPPED: heads name nobody;
    HISTORY: ExpertTransformers, which are asked as the rows of the run ask them, do."""
    layers, top_k = bench.shape.layers, bench.shape.moe.top_k
    routing = missing(bench.shape, new, SETTLE + STEPS)
    with bench.open(3 * layers * top_k) as source:
        if kind != PLAIN:
            # Nobody rests: that would cost nothing.
            source._shelf.throttle = Throttle(most_silent=math.inf)  # noqa: SLF001
            nobody = np.zeros((len(routing.ids), layers, 1, NAMED), dtype=np.int32)
            shape, device = bench.shape, bench.device
            if kind == TAPPED:
                bench.rig.predict(made_up_forecaster(shape, "heads", 1, torch.bfloat16, device), nobody)
            else:
                assert bench.history is not None, "a row of the run asks one"
                bench.rig.predict(made_up_network(shape, bench.history, device), nobody)
        yield source, routing


@dataclass(frozen=True)
class Point:
    """How many experts a layer misses, and medians of steps: seconds of the graph, and of the host until the next one.

    (When `missing` has gone round, a step finds what the first one has left, which came thrice: that one is no median.)
    """

    misses: int
    graph: float
    host: float


def points(bench: "Bench") -> tuple[list[Point], ...]:
    """By kind, in turn, for no to k experts that are missing in every layer; all of it ROUNDS times."""
    kinds = [PLAIN, TAPPED, *([HISTORY] if bench.history else [])]
    found: tuple[list[Point], ...] = ([], [], [])
    every = bench.shape.moe.top_k + 1
    for number in range(ROUNDS * every):
        new = number % every
        for kind in kinds if number // every % 2 == 0 else kinds[::-1]:
            with known(bench, new, kind) as (source, routing):
                steps, counts = bench.steps(source, routing, SETTLE, STEPS)
            host = statistics.median(whole - graph for whole, graph in zip(steps, bench.graphs, strict=True))
            assert abs(counts["misses"] / bench.shape.layers - new) < 0.1 * new + 0.01, (
                f"{new} are missing in most steps"
            )
            found[kind].append(Point(new, statistics.median(bench.graphs), host))
    return found


def kernels(bench: "Bench", new: int, kind: int) -> list[Kernel]:
    """Of a few steps."""
    with known(bench, new, kind) as (source, routing):
        bench.steps(source, routing, SETTLE, 1)
        return kernels_of(lambda: bench.steps(source, routing, SETTLE, 4))
