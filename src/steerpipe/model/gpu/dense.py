"""Dense products of a pass: our own GEMV for one row, cuBLAS for several.

Both give the same numbers up to rounding, but they are two classes: a request stays in one (ADR 0004). Legend: R rows,
H hidden, I width, E experts.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.kernels.linear import gated, row_gated_linear, row_linear
from steerpipe.kernels.norm import rms_norm
from steerpipe.model.layers import MlpWeights


class Dense(Protocol):
    """Everything of a layer that is a matrix product with weights that never leave. Results are new tensors."""

    def project(self, x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """norm(x) · weight + bias: [R, H] → [R, N]."""
        ...

    def add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """residual + (x · weight + bias): [R, H]."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def score(self, x: Tensor, norm: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x) [R, H], and the router's logits of it [R, E], fp32."""
        ...

    def gated(self, x: Tensor, norm: Tensor | None, weights: MlpWeights) -> Tensor:
        """The hidden values of a gated MLP, of norm(x) where a norm is given: [R, I]."""
        ...

    def head(self, x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        """Logits, fp32: [R, vocab]."""
        ...


class OneRow:
    """One row: the norm is part of the product that follows it, so a layer is few launches."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def project(self, x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(1, weight.shape[0])
        row_linear(x, weight, out=out, bias=bias, norm=norm, eps=self._eps)
        return out

    def add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(residual)
        row_linear(x, weight, out=out, bias=bias, residual=residual)
        return out

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(1, weight.shape[0])
        row_linear(x, weight, out=out)
        return out

    def score(self, x: Tensor, norm: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x)
        logits = x.new_empty(1, router.shape[0], dtype=torch.float32)
        row_linear(x, router, out=logits, norm=norm, eps=self._eps, normed=normed)
        return normed, logits

    def gated(self, x: Tensor, norm: Tensor | None, weights: MlpWeights) -> Tensor:
        out = x.new_empty(1, weights.down.shape[1])
        row_gated_linear(x, weights.gate_up, out=out, norm=norm, eps=self._eps)
        return out

    def head(self, x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(1, weight.shape[0], dtype=torch.float32)
        row_linear(x, weight, out=out, norm=norm, eps=self._eps)
        return out


class ManyRows:
    """A cell of 16 rows, or a prompt chunk of several cells, in one product each."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    def project(self, x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self._normed(x, norm), weight, bias)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return residual + F.linear(x, weight, bias)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def score(self, x: Tensor, norm: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(x, norm)
        return normed, F.linear(normed.float(), router)

    def gated(self, x: Tensor, norm: Tensor | None, weights: MlpWeights) -> Tensor:
        both = F.linear(x if norm is None else self._normed(x, norm), weights.gate_up)  # [R, 2I]
        out = x.new_empty(x.shape[0], weights.down.shape[1])
        gated(both, out=out)
        return out

    def head(self, x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self._normed(x, norm), weight).float()

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rms_norm(x, norm, self._eps, out=out)
        return out
