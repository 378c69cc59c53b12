"""The rates that `replay` needs of a machine without a GPU: compute measured alone, misses in real steps.

What an expert computes is timed by itself: nothing else runs meanwhile. What a miss costs is not, because a reader and
an engine in one interpreter slow each other as the steps around a miss have it. So it is solved for: the two figures
with which the replay of calibration runs (of the product, at budgets that are not predicted) takes as long as they did.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steerpipe.model.moe import MoeWeights, Route, run_experts, run_shared
from steerpipe.model.weights import build_weights
from steerpipe.store.reader import open_pack
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.machine import Decoding, Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.replay_report import ReplayReport

CPU = torch.device("cpu")
REPEATS = 96  # of each number of experts
NUDGE = 1e-5  # seconds: for the slopes of a replay
FIRST = 1e-3  # seconds: long enough that no compute hides a miss, so that every slope is seen
SOLVES, CLOSE = 8, 1e-8  # at most, and seconds: a replay's time is a line but for its kinks


@dataclass(frozen=True)
class ComputeRates:
    """Seconds of one row, everything in memory."""

    expert: float  # one more of a layer's routed experts
    shared: float  # the shared expert; 0 for a family without one


@dataclass(frozen=True)
class Seen:
    """A run of the product within a budget."""

    recording: Recording
    share: float
    seconds: float  # per token after the warm-up: median


def replayed(machine: Machine, recording: Recording, share: float, warmup_tokens: int) -> ReplayReport:
    """That recording on the machine with so many slots."""
    machine = replace(machine, slots=slots_of_share(share, recording.all_experts))
    return replay(recording, machine, "lfru", warmup_tokens=warmup_tokens)


def solve_misses(machine: Machine, seen: Sequence[Seen], warmup_tokens: int) -> Machine:
    """`machine` with the ask and decode seconds, none below 0, whose replays come nearest to the runs' seconds."""

    def at(figures: NDArray[np.float64]) -> Machine:
        ask, decode = (float(each) for each in figures)
        return replace(machine, ask_seconds=ask, decoding=Decoding(decode))

    def predict(figures: NDArray[np.float64]) -> NDArray[np.float64]:
        """Relative to what was seen."""
        candidate = at(figures)
        return np.array([
            replayed(candidate, run.recording, run.share, warmup_tokens).tpot_median_seconds / run.seconds
            for run in seen
        ])  # fmt: skip

    found = np.full(2, FIRST)
    for _ in range(SOLVES):
        here = predict(found)
        slopes = np.column_stack([(predict(found + step) - here) / NUDGE for step in NUDGE * np.eye(2)])  # [runs, 2]
        before, found = found, _nearest(slopes, 1 - here + slopes @ found)
        if np.abs(found - before).max() < CLOSE:
            break
    return at(found)


def _nearest(slopes: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of slopes @ x = wanted over x of two figures, none below 0."""
    best, least = np.zeros(2), float(wanted @ wanted)
    for free in ([0], [1], [0, 1]):
        tried = np.zeros(2)
        tried[free] = np.linalg.lstsq(slopes[:, free], wanted, rcond=None)[0]
        off = slopes @ tried - wanted
        if (tried >= 0).all() and float(off @ off) < least:
            best, least = tried, float(off @ off)
    return best


class Compute:
    """A pack's experts in memory and one row to compute with."""

    def __init__(self, pack: Path) -> None:
        opened = open_pack(pack)
        self.layers = opened.spec.moe_layers
        self.moe = opened.spec.moe(self.layers[0])
        self.block_bytes = opened.layout(self.layers[0]).block_bytes
        self._resident = ResidentExperts.load(opened, torch.float32, CPU)
        self._random = random.Random(7)
        self._x = torch.randn(1, opened.spec.hidden)
        weights = build_weights(opened.spec, opened.family.names, opened.read_dense(), torch.float32, CPU)
        own = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MoeWeights)]
        self._shared = [each for each in own if each.shared is not None]  # by layer; empty: a family without

    def rates(self) -> ComputeRates:
        counts = range(1, self.moe.top_k + 1)
        times = [median_seconds(partial(self._experts, count), REPEATS) for count in counts]
        shared = median_seconds(self._shared_expert, 4 * REPEATS) if self._shared else 0.0
        return ComputeRates(float(np.polyfit(counts, times, 1)[0]), shared)

    def _experts(self, count: int) -> None:
        layer, experts = self._random.choice(self.layers), self._random.sample(range(self.moe.experts), count)
        route = Route(torch.tensor([experts]), torch.ones(1, count))
        with self._resident.lease(layer, experts) as lease:
            run_experts(self._x, route, torch.tensor([0]), lease, cell=1)

    def _shared_expert(self) -> None:
        run_shared(self._x, self._random.choice(self._shared), 1)


def median_seconds(work: Callable[[], None], times: int) -> float:
    return statistics.median(_spent(work, times))


def _spent(work: Callable[[], None], times: int) -> Iterable[float]:
    for _ in range(times):
        begin = time.perf_counter()
        work()
        yield time.perf_counter() - begin
