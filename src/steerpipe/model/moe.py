"""The MoE layer: route, ask for experts by lease, compute what has arrived, add in expert order.

R rows (padded), V valid rows, k experts per row, E experts, H hidden.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.protocols import ExpertWeights, Lease
from steerpipe.model.cells import by_cell
from steerpipe.model.layers import MlpWeights, gated_activation, gated_mlp
from steerpipe.model.spec import MoeSpec


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Tensor  # [E, H], fp32: routing is decided in fp32 whatever the model's dtype
    shared: MlpWeights | None
    shared_switch: Tensor | None  # [1, H]


@dataclass(frozen=True, slots=True)
class Route:
    """Which experts each valid row uses; rank order is the router's."""

    experts: Tensor  # [V, k] int64
    gates: Tensor  # [V, k] fp32


@dataclass(frozen=True, slots=True)
class StandIns:
    """Outputs that take the place of experts that do not run, for (row, rank) pairs, numbered row by row."""

    pairs: tuple[int, ...]
    vectors: Tensor  # [pairs, H]


class Nearby(Protocol):
    """Experts of one layer that the CPU computes where they lie. They stay there until each was computed."""

    @property
    def experts(self) -> Collection[int]: ...

    def compute(self, expert: int, x: Tensor) -> Tensor:
        """x: [n, H] on the CPU → [n, H]. An expert may be asked for several times, one after the other."""
        ...

    def let_go(self) -> None:
        """All of them may leave. Twice is once."""
        ...


def route_rows(x: Tensor, router: Tensor, spec: MoeSpec, valid: Tensor, cell: int) -> Route:
    """x: [R, H] → the router's choice for the rows in `valid` [V]."""
    probabilities = by_cell(lambda rows: F.linear(rows.float(), router).softmax(-1), x, cell=cell)  # [R, E]
    gates, experts = probabilities.index_select(0, valid).topk(spec.top_k, dim=-1)
    if spec.renormalise:
        gates = gates / gates.sum(-1, keepdim=True)
    return Route(experts, gates)


def pair_up(route: Route, stand_ins: StandIns | None = None) -> dict[int, list[int]]:
    """Every expert that some row needs → its (row, rank) pairs, numbered row by row, but those that have a stand-in."""
    replaced = frozenset(stand_ins.pairs) if stand_ins is not None else frozenset()
    pairs_of: dict[int, list[int]] = {}
    for pair, expert in enumerate(route.experts.flatten().tolist()):
        if pair not in replaced:
            pairs_of.setdefault(expert, []).append(pair)
    return pairs_of


def worth_keeping(route: Route, keep_rows: int) -> set[int] | None:
    """The experts of the last `keep_rows` rows: those of earlier prompt tokens are not. None: all of them."""
    rows = len(route.experts)
    return None if keep_rows >= rows else set(route.experts[rows - keep_rows :].flatten().tolist())


def run_experts(
    x: Tensor, route: Route, valid: Tensor, lease: Lease, *, cell: int, stand_ins: StandIns | None = None,
    nearby: Nearby | None = None,
) -> Tensor:  # fmt: skip
    """What each routed expert gives, for each valid row: [V, k, H], to be weighed and added by `combine`."""
    pairs_of = pair_up(route, stand_ins)
    work = _PairWork(x, valid, route.experts.shape[1], cell)
    if stand_ins is not None:
        work.part[list(stand_ins.pairs)] = stand_ins.vectors.to(x.dtype)
    if nearby is not None:  # first: the others are on their way meanwhile
        for expert in nearby.experts:
            work.run_nearby(nearby, expert, pairs_of[expert])
        nearby.let_go()
    for wave in lease.waves():
        if wave.experts:
            work.run([(wave.table[expert], pairs_of[expert]) for expert in wave.experts])
    return work.part[:-1].view(*route.experts.shape, -1)


class _PairWork:
    """(row, rank) pairs of one layer through their experts: whoever arrives, each in cells of its own.

    Only the products are done cell by cell. Gathering, activation and scattering are done for all cells of a wave at
    once, which halves the time of a step where most experts have one row (8 sequences, 60 experts, top-4).
    """

    def __init__(self, x: Tensor, valid: Tensor, top_k: int, cell: int) -> None:
        self._x = torch.cat([x, x.new_zeros(1, x.shape[1])])  # the last row pads cells
        self._rows = [row for row in valid.tolist() for _ in range(top_k)] + [len(x)]  # of each pair, and of padding
        self._cell = cell
        self.part = x.new_empty(len(self._rows), x.shape[1])  # one output per pair; the last is of padding

    def run(self, wave: Sequence[tuple[ExpertWeights, list[int]]]) -> None:
        cell = self._cell
        cells = [(weights, own) for weights, pairs in wave for own in self._cells(pairs)]
        pairs = [pair for _, own in cells for pair in own]
        rows = self._gather(pairs)  # [cells · cell, H]
        inner = [F.linear(r, w.gate_up, w.gate_up_bias) for r, (w, _) in zip(rows.split(cell), cells, strict=True)]
        hidden = gated_activation(torch.cat(inner))  # [cells · cell, I]
        outer = [F.linear(h, w.down, w.down_bias) for h, (w, _) in zip(hidden.split(cell), cells, strict=True)]
        self.part.index_copy_(0, self._index(pairs), torch.cat(outer))

    def run_nearby(self, nearby: Nearby, expert: int, pairs: list[int]) -> None:
        for own in self._cells(pairs):
            self.part.index_copy_(0, self._index(own), nearby.compute(expert, self._gather(own)))

    def _cells(self, pairs: list[int]) -> list[list[int]]:
        """Cut to cells; the last is filled up with the pair that pads."""
        cell, nowhere = self._cell, len(self._rows) - 1
        cut = [pairs[at : at + cell] for at in range(0, len(pairs), cell)]
        return [own + [nowhere] * (cell - len(own)) for own in cut]

    def _gather(self, pairs: list[int]) -> Tensor:
        return self._x.index_select(0, self._index([self._rows[pair] for pair in pairs]))

    def _index(self, places: list[int]) -> Tensor:
        return torch.tensor(places, device=self._x.device)


def expert_ffn(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Rows of one expert: [R, H] → [R, H]."""
    hidden = gated_activation(F.linear(x, weights.gate_up, weights.gate_up_bias))
    return F.linear(hidden, weights.down, weights.down_bias)


def combine(part: Tensor, route: Route) -> Tensor:
    """part: [V, k, H] → [V, H]; contributions are added in ascending expert order, in fp32."""
    ascending = route.experts.argsort(dim=1)[..., None]  # [V, k, 1]
    weighted = (part.float() * route.gates[..., None]).take_along_dim(ascending, dim=1)  # [V, k, H]
    total = weighted[:, 0]
    for rank in range(1, part.shape[1]):  # one after the other: a library's sum may take another order
        total = total + weighted[:, rank]
    return total


def run_shared(x: Tensor, weights: MoeWeights, cell: int) -> Tensor:
    """The shared expert behind its sigmoid switch: [R, H]."""
    shared, switch = weights.shared, weights.shared_switch
    assert shared is not None and switch is not None, "this family has no shared expert"
    return by_cell(lambda rows: torch.sigmoid(F.linear(rows, switch)) * gated_mlp(rows, shared), x, cell=cell)
