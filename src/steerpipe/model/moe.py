"""The MoE layer: route, ask for experts by lease, compute what has arrived, add in expert order.

R rows (padded), V valid rows, k experts per row, E experts, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.protocols import ExpertSource, ExpertWeights
from steerpipe.model.cells import by_cell, gather_cells
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


def route_rows(x: Tensor, router: Tensor, spec: MoeSpec, valid: Tensor, cell: int) -> Route:
    """x: [R, H] → the router's choice for the rows in `valid` [V]."""
    probabilities = by_cell(lambda rows: F.linear(rows.float(), router).softmax(-1), x, cell=cell)  # [R, E]
    gates, experts = probabilities.index_select(0, valid).topk(spec.top_k, dim=-1)
    if spec.renormalise:
        gates = gates / gates.sum(-1, keepdim=True)
    return Route(experts, gates)


def run_experts(
    x: Tensor, route: Route, valid: Tensor, source: ExpertSource, layer: int, *, cell: int, keep_rows: int
) -> Tensor:
    """Sum of gate · expert(row) over the routed experts, for each valid row: [V, H], fp32.

    The experts of the last `keep_rows` rows are worth keeping; those of earlier prompt tokens are not.
    """
    pairs_of: dict[int, list[int]] = {}  # expert → its (row, rank) pairs, numbered row by row
    for pair, expert in enumerate(route.experts.flatten().tolist()):
        pairs_of.setdefault(expert, []).append(pair)
    row_of = valid.repeat_interleave(route.experts.shape[1])  # [V · k]
    part = x.new_empty(len(row_of), x.shape[1])  # one output per pair, whatever the order of arrival
    keep = None if keep_rows >= len(valid) else set(route.experts[len(valid) - keep_rows :].flatten().tolist())
    with source.lease(layer, list(pairs_of), keep) as lease:
        for wave in lease.waves():
            for expert in wave.experts:
                pairs = torch.tensor(pairs_of[expert], device=x.device)
                rows = gather_cells(x, row_of[pairs], cell)
                part[pairs] = by_cell(lambda r, w=wave.table[expert]: expert_ffn(r, w), rows, cell=cell)[: len(pairs)]
    return combine(part.view(*route.experts.shape, -1), route)


def expert_ffn(x: Tensor, weights: ExpertWeights) -> Tensor:
    """One cell through one expert: [R, H] → [R, H]."""
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
