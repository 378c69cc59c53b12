"""Routed experts as grouped matrix products: rows sorted by expert, one product per group, rows put back.

The pilot computed all 60 experts for every token as one masked dense product: 15 times the arithmetic of top-4.
Legend: T tokens, k experts per token, R = T * k routed rows, E experts, H hidden, W expert width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Dispatch(torch.autograd.Function):
    """Token rows to expert order: out[i] = x[order[i] // k]. Its adjoint is `Combine`, a gather as well: no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        return x[order // (len(order) // len(x))]  # [R, H]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        order, place = ctx.saved_tensors
        return combine(gradient, order, place), None, None


class Combine(torch.autograd.Function):
    """Sum of each token's k rows: out[t] = sum_j y[place[t, j]], where `place` [T, k] inverts `order` [R]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        return y[place].sum(1)  # [T, H]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        order, place = ctx.saved_tensors
        return dispatch(gradient, order, place), None, None


dispatch: Callable[[Tensor, Tensor, Tensor], Tensor] = Dispatch.apply
combine: Callable[[Tensor, Tensor, Tensor], Tensor] = Combine.apply


def top_k(probability: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` over the last axis as k maxima, which the compiler fuses into the softmax before it."""
    left, chosen = probability.detach(), []
    column = torch.arange(probability.shape[-1], device=probability.device)
    for _ in range(k):
        best = left.argmax(-1, keepdim=True)  # [T, 1]
        chosen.append(best)
        left = torch.where(column == best, -1.0, left)
    expert = torch.cat(chosen, -1)  # [T, k]
    return probability.gather(-1, expert), expert


def routed_experts(x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over each token's experts of weight * expert(x), and the rows routed to each expert [E].

    x [T, H], weight and expert [T, k], gate_up [E, 2W, H], down [E, H, W]; all in one floating dtype but `expert`.
    """
    tokens, k = expert.shape
    order, bounds = sort_rows(expert.flatten(), len(gate_up))
    place = torch.empty_like(order)
    place = place.scatter(0, order, torch.arange(tokens * k, device=x.device)).view(tokens, k)
    rows = dispatch(x, order, place)  # [R, H]
    gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=bounds).chunk(2, -1)  # [R, W] each
    # The weight is applied on the narrow side: W columns instead of H, and the down product is linear.
    active = F.silu(gate) * up * dispatch(weight.reshape(-1, 1), order, place.view(-1, 1))
    out = F.grouped_mm(active, down.transpose(1, 2), offs=bounds)  # [R, H]
    load = torch.diff(bounds, prepend=bounds.new_zeros(1))
    return combine(out, order, place), load


def sort_rows(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by expert, stable, and the end of each expert's group [E] int32."""
    ids, order = torch.sort(expert.to(torch.uint8) if experts <= 256 else expert, stable=True)
    column = torch.arange(experts, device=expert.device, dtype=ids.dtype)
    return order, torch.searchsorted(ids, column, right=True, out_int32=True)
