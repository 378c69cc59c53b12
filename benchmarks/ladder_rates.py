"""The rates that `replay` needs of a machine without a GPU, measured piece by piece: no engine, no step, no routing.

A MoE layer is computed as a step computes it, with chosen experts. With n of them, all resident, it takes
base + n · expert. With top_k of them, n absent, it takes base + ask + n · (read + decode) + expert: the shared expert
and all others are computed while the absent ones are on their way, but for the last. That holds from n = 2 on, where
the way is long enough. The link's own meter says what of it is the read; "decode" is all that the reader does beside
its reads while compute goes on, waiting for the interpreter's lock included.
"""

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from steerpipe.core.protocols import ExpertSource
from steerpipe.model.moe import MoeWeights, Route, run_experts, run_shared
from steerpipe.model.weights import build_weights
from steerpipe.store.reader import open_pack
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.source import LadderSource

CPU = torch.device("cpu")
SHARE = 0.375  # of all experts in slots while misses are measured: none of the points that are predicted
REPEATS = 96  # of each number of experts


@dataclass(frozen=True)
class LayerRates:
    """Of a layer whose experts are resident. Seconds."""

    base: float
    expert: float


@dataclass(frozen=True)
class MissRates:
    """Of one link. Seconds."""

    ask: float  # per layer that misses
    read: float  # per block
    decode: float  # per block


class Pieces:
    """A pack and one row to compute with. Deterministic but for the clock."""

    def __init__(self, pack: Path) -> None:
        self.pack = open_pack(pack)
        self.layers = self.pack.spec.moe_layers
        self.moe = self.pack.spec.moe(self.layers[0])
        self.block_bytes = self.pack.layout(self.layers[0]).block_bytes
        self._resident = ResidentExperts.load(self.pack, torch.float32, CPU)
        self._random = random.Random(7)
        self._x = torch.randn(1, self.pack.spec.hidden)
        self._valid = torch.tensor([0])
        weights = build_weights(self.pack.spec, self.pack.family.names, self.pack.read_dense(), torch.float32, CPU)
        own = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MoeWeights)]
        self._shared = [each for each in own if each.shared is not None]  # by layer; empty: a family without

    def layer_rates(self) -> LayerRates:
        times: dict[int, list[float]] = {count: [] for count in range(1, self.moe.top_k + 1)}
        for _ in range(REPEATS):
            for count in times:
                times[count].append(self._compute_resident(count))
        expert, base = self._fit(times)
        return LayerRates(base, expert)

    def shared_seconds(self) -> float:
        """The shared expert of some layer, one row; 0 for a family without one."""
        if not self._shared:
            return 0.0
        times = []
        for number in range(4 * REPEATS):
            begin = time.perf_counter()
            run_shared(self._x, self._shared[number % len(self._shared)], 1)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def miss_rates(self, pace: float | None, layer: LayerRates) -> MissRates:
        """A layer of resident experts is computed before each, as a step would keep the thread busy."""
        slots = int(SHARE * len(self.layers) * self.moe.experts)
        times: dict[int, list[float]] = {count: [] for count in range(2, self.moe.top_k + 1)}
        with LadderSource.open(self.pack, slots=slots, dtype=torch.float32, pace=pace) as source:
            source.warm(self._random.sample(source.experts, slots))
            source.check_integrity()  # waits until nothing moves
            before = source.counters()
            for _ in range(REPEATS):
                for count in times:
                    place, experts = self._choose(source, count)
                    self._compute_resident(self.moe.top_k)
                    times[count].append(self._compute(source, place, experts, shared=True))
            counted = source.counters() - before
        block, fixed = self._fit(times)
        read = counted.link_seconds / counted.link_reads
        return MissRates(max(0.0, fixed - layer.base - layer.expert), read, max(0.0, block - read))

    def _fit(self, times: dict[int, list[float]]) -> tuple[float, float]:
        """Slope and intercept of the medians."""
        slope, intercept = np.polyfit(list(times), [statistics.median(spent) for spent in times.values()], 1)
        return float(slope), float(intercept)

    def _compute_resident(self, count: int) -> float:
        experts = self._random.sample(range(self.moe.experts), count)
        return self._compute(self._resident, self._random.choice(self.layers), experts)

    def _compute(self, source: ExpertSource, layer: int, experts: list[int], *, shared: bool = False) -> float:
        """Seconds of one row through those experts; `shared`: and through a shared one, once they are asked for."""
        route = Route(torch.tensor([experts]), torch.ones(1, len(experts)))
        begin = time.perf_counter()
        with source.lease(layer, experts) as lease:
            if shared and self._shared:
                run_shared(self._x, self._random.choice(self._shared), 1)
            run_experts(self._x, route, self._valid, lease, cell=1)
        return time.perf_counter() - begin

    def _choose(self, source: LadderSource, absent: int) -> tuple[int, list[int]]:
        """top_k experts of some layer, so many of them absent."""
        there: dict[int, set[int]] = {layer: set() for layer in self.layers}
        for expert in source.residents:
            there[expert.layer].add(expert.expert)
        present, most = self.moe.top_k - absent, self.moe.experts - absent
        layer = self._random.choice([each for each in self.layers if present <= len(there[each]) <= most])
        others = [expert for expert in range(self.moe.experts) if expert not in there[layer]]
        return layer, self._random.sample(others, absent) + self._random.sample(sorted(there[layer]), present)
