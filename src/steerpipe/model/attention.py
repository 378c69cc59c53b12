"""Causal attention over KV blocks, with splits at absolute key positions.

A unit is what attends together: one prefill cell (16 rows at consecutive positions), or one decode row. Its work is
a loop over whole 128-key blocks from position 0 (or from the window's first block) to its own, so every
product's shape follows from the unit's absolute position alone. Scores, softmax and sums are fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from steerpipe.model.kv_cache import BLOCK, KvSequence
from steerpipe.model.spec import AttentionSpec

_LOWEST = -1e30  # finite, so that a row whose first blocks are all masked does not compute inf - inf


@dataclass(frozen=True, slots=True)
class AttentionUnit:
    """Rows `row … row + rows - 1` of the step, at positions `position …`; of these, `valid` [from, to) are real."""

    kv: KvSequence
    row: int
    rows: int
    position: int
    valid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qkv: Tensor  # [(heads + 2 kv_heads) D, H]
    qkv_bias: Tensor | None
    out: Tensor  # [H, heads · D]
    out_bias: Tensor | None
    query_norm: Tensor | None  # [D] or [heads · D]
    key_norm: Tensor | None  # [D] or [kv_heads · D]


@lru_cache(maxsize=512)
def _hidden(ahead: int, rows: int, group: int, window: int | None, device: torch.device) -> Tensor:
    """Keys that a unit must not see: [rows · group, BLOCK]; `ahead` is its position less the block's first."""
    at = torch.arange(ahead, ahead + rows, device=device).repeat_interleave(group)[:, None]
    key_at = torch.arange(BLOCK, device=device)
    hidden = key_at > at
    return hidden | (key_at <= at - window) if window else hidden


def store_keys(layer: int, unit: AttentionUnit, keys: Tensor, values: Tensor) -> None:
    """Writes the unit's real rows; keys, values: [R, kv_heads, D] of the whole step."""
    first, last = unit.row + unit.valid[0], unit.row + unit.valid[1]
    unit.kv.write(layer, unit.position + unit.valid[0], keys[first:last], values[first:last])


def alike(units: Sequence[AttentionUnit], spec: AttentionSpec) -> list[list[AttentionUnit]]:
    """The units in groups that attend together: of as many rows, over as many blocks of keys."""
    groups: dict[tuple[int, int], list[AttentionUnit]] = {}
    for unit in units:
        first, last = _keys(unit, spec)
        groups.setdefault((unit.rows, last // BLOCK - first // BLOCK), []).append(unit)
    return list(groups.values())


def rows_of(units: Sequence[AttentionUnit]) -> slice | list[int]:
    """Which rows of the step the units are, in their order."""
    if len(units) == 1:
        return slice(units[0].row, units[0].row + units[0].rows)
    return [row for unit in units for row in range(unit.row, unit.row + unit.rows)]


def attend(layer: int, spec: AttentionSpec, units: Sequence[AttentionUnit], queries: Tensor) -> Tensor:
    """queries: [rows, heads, D] of units that are alike → [rows, heads · D], in the queries' dtype.

    Each unit's products are its own, so their shapes do not depend on who attends beside it. What lies between them
    goes row by row, and is done for all units at once: eight sequences cost 24 operations less than eight times 24.
    """
    count, rows, group = len(units), units[0].rows, spec.heads // spec.kv_heads
    # [U, rows, kv, group, D] → [U, kv, rows · group, D]: heads of one group read the same keys
    q = queries.float().view(count, rows, spec.kv_heads, group, spec.head_dim).transpose(1, 2)
    q = q.reshape(count, spec.kv_heads, rows * group, spec.head_dim) * spec.head_dim**-0.5
    top = q.new_full((count, spec.kv_heads, rows * group, 1), _LOWEST)
    mass = torch.zeros_like(top)
    total = torch.zeros_like(q)
    own = q.unbind()
    for blocks in zip(*(unit.kv.read(layer, *_keys(unit, spec)) for unit in units), strict=True):
        scores = torch.stack([mine @ k.float().transpose(1, 2) for mine, (_, k, _) in zip(own, blocks, strict=True)])
        starts = [start for start, _, _ in blocks]
        hidden = [_hidden_in(unit, start, group, spec, q.device) for unit, start in zip(units, starts, strict=True)]
        if any(mask is not None for mask in hidden):
            nothing = _nothing(rows * group, q.device)
            masks = torch.stack([nothing if mask is None else mask for mask in hidden])  # [U, rows · group, BLOCK]
            scores.masked_fill_(masks[:, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - higher)
        weights = torch.exp(scores - higher)
        mass = mass * shrink + weights.sum(-1, keepdim=True)
        seen = [mine @ values.float() for mine, (_, _, values) in zip(weights.unbind(), blocks, strict=True)]
        total = total * shrink + torch.stack(seen)
        top = higher
    mixed = (total / mass).view(count, spec.kv_heads, rows, group, spec.head_dim).transpose(1, 2)
    return mixed.reshape(count * rows, spec.heads * spec.head_dim).to(queries.dtype)


def _keys(unit: AttentionUnit, spec: AttentionSpec) -> tuple[int, int]:
    """First and last position that the unit attends to."""
    first = max(0, unit.position - spec.window + 1) if spec.window else 0
    return first, unit.position + unit.rows - 1


def _hidden_in(unit: AttentionUnit, start: int, group: int, spec: AttentionSpec, device: torch.device) -> Tensor | None:
    """What the unit must not see of the block at `start`; None: it may see all of it."""
    if start + BLOCK > unit.position + 1 or spec.window:
        return _hidden(unit.position - start, unit.rows, group, spec.window, device)
    return None


@lru_cache(maxsize=8)
def _nothing(rows: int, device: torch.device) -> Tensor:
    """Hides nothing: [rows, BLOCK]."""
    return torch.zeros(rows, BLOCK, dtype=torch.bool, device=device)
