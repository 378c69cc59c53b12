"""Rotary position embedding: frequencies of every kind, and a table of cosines and sines by absolute position."""

import math

import torch
from torch import Tensor

from steerpipe.model.spec import RopeKind, RopeSpec

_TABLE_STEP = 1024  # positions computed at a time, so that an entry never depends on how far the table reaches


def frequencies(spec: RopeSpec) -> Tensor:
    """Angle per position for each rotated pair: [dim / 2], fp32."""
    exponent = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    base = 1.0 / (spec.theta**exponent)
    if spec.kind is RopeKind.LINEAR:
        return base / spec.factor
    if spec.kind is RopeKind.LLAMA3:
        return _llama3(base, spec)
    if spec.kind is RopeKind.YARN:
        return _yarn(base, spec)
    if spec.kind is RopeKind.LONGROPE:
        return 1.0 / (torch.tensor(spec.short_factor, dtype=torch.float32) * spec.theta**exponent)
    return base


def _llama3(base: Tensor, spec: RopeSpec) -> Tensor:
    """Long wavelengths are divided by the factor, short ones are kept, those between are blended."""
    turns = spec.original_context * base / (2 * math.pi)  # within the trained context
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / spec.factor + blend * base


def _yarn(base: Tensor, spec: RopeSpec) -> Tensor:
    """Dimensions that turn often are extrapolated, those that turn rarely interpolated, with a ramp between."""

    def dimension(turns: float) -> float:  # the pair that turns this often within the trained context
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / spec.factor * interpolated + base * (1 - interpolated)


class RopeTable:
    """cos and sin for absolute positions, grown on demand. Not thread-safe: one engine thread."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self._spec = spec
        self._frequencies = frequencies(spec)
        self._device = device
        self._table = torch.empty(0, 2, spec.dim // 2, device=device)

    def rows(self, positions: Tensor, highest: int) -> Tensor:
        """[R] positions → [R, 2, dim / 2] fp32: cosines and sines. `highest` is the largest of them."""
        while highest >= self._table.shape[0]:
            self._grow()
        return self._table.index_select(0, positions)

    def _grow(self) -> None:
        start = self._table.shape[0]
        at = torch.arange(start, start + _TABLE_STEP, dtype=torch.float32)
        angle = at[:, None] * self._frequencies  # [step, dim / 2]
        new = torch.stack([angle.cos(), angle.sin()], dim=1) * self._spec.attention_factor
        self._table = torch.cat([self._table, new.to(self._device)])


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates pairs (i, i + dim/2): x [R, heads, D], turn [R, 2, dim / 2]; fp32 inside, x's dtype out."""
    cos, sin = turn[:, 0, None], turn[:, 1, None]  # [R, 1, dim / 2]
    first, second = x.float().chunk(2, dim=-1)  # [R, heads, D / 2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
