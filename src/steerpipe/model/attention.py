"""Causal attention over KV blocks, with splits at absolute key positions.

A unit is what attends together: one prefill cell (16 rows at consecutive positions), or one decode row. Its work is
a loop over whole 128-key blocks from position 0 (or from the window's first block) to its own, so every
product's shape follows from the unit's absolute position alone. Scores, softmax and sums are fp32.
"""

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


def attend(layer: int, spec: AttentionSpec, unit: AttentionUnit, queries: Tensor) -> Tensor:
    """queries: [rows, heads, D] of the unit → [rows, heads · D], in the queries' dtype."""
    rows, group = unit.rows, spec.heads // spec.kv_heads
    # [rows, kv, group, D] → [kv, rows · group, D]: heads of one group read the same keys
    q = queries.float().view(rows, spec.kv_heads, group, spec.head_dim).transpose(0, 1)
    q = q.reshape(spec.kv_heads, rows * group, spec.head_dim) * spec.head_dim**-0.5
    top = q.new_full((spec.kv_heads, rows * group, 1), _LOWEST)
    mass = torch.zeros_like(top)
    total = torch.zeros_like(q)
    last = unit.position + rows - 1
    first = max(0, unit.position - spec.window + 1) if spec.window else 0
    for start, keys, values in unit.kv.read(layer, first, last):
        scores = q @ keys.float().transpose(1, 2)  # [kv, rows · group, BLOCK]
        if start + BLOCK > unit.position + 1 or spec.window:
            scores.masked_fill_(_hidden(unit.position - start, rows, group, spec.window, q.device), -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp(top - higher)
        weights = torch.exp(scores - higher)
        mass = mass * shrink + weights.sum(-1, keepdim=True)
        total = total * shrink + weights @ values.float()
        top = higher
    mixed = (total / mass).view(spec.kv_heads, rows, group, spec.head_dim).transpose(0, 1)
    return mixed.reshape(rows, spec.heads * spec.head_dim).to(queries.dtype)
