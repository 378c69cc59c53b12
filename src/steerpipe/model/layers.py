"""The small parts of a decoder layer. R rows of one cell, H hidden, I width."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: a dense layer's, or a shared expert's."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in fp32, result in x's dtype. Normalises the last dimension."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def gated_activation(gate_up: Tensor) -> Tensor:
    """silu(gate) · up: [R, 2I] → [R, I].

    Not F.silu: its exponential differs between torch's vector loop and the scalar tail, and from 3 threads and
    R · I > 32,768 on that tail falls where one thread's share ends, in the middle of some rows. torch.exp has no
    scalar tail, and the other operations are exact to the last bit everywhere.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def gated_mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    return F.linear(gated_activation(F.linear(x, weights.gate_up)), weights.down)
