"""Muon for matrices, AdamW for everything else, in one object whose state is a flat dict of tensors.

Muon moves each matrix along the orthogonalised momentum of its gradient. Updates are scaled to an RMS of 0.2 per entry,
about that of an AdamW step, so that one rate suits every shape and rates are comparable between the two.
Momentum is orthogonalised in batches: all matrices of one size in the whole model at once (4,320 experts' in nano).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPSILON = 1e-8
UPDATE_RMS = 0.2
_VECTOR_LIKE = ("embedding", "router", "shared_gate")  # rows are looked up or compared, not composed: AdamW


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of each matrix [n, rows, columns], rows <= columns: singular values land between 0.7 and 1.2."""
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith(_VECTOR_LIKE)


class MuonAdamW:
    """`step` after `backward`; rates are given per step, because the schedule belongs to the plan."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> None:
        named = dict(parameters)
        self.weight_decay = weight_decay
        self.matrices = {name: p for name, p in named.items() if is_matrix(name, p)}
        self.vectors = {name: p for name, p in named.items() if name not in self.matrices}
        self.first = {name: torch.zeros_like(p) for name, p in named.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.vectors.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, matrix_rate: float, vector_rate: float) -> None:
        self.steps += 1
        self._step_matrices(matrix_rate)
        self._step_vectors(vector_rate)

    def _step_matrices(self, rate: float) -> None:
        gradients = [_gradient(p) for p in self.matrices.values()]
        momenta = [self.first[name] for name in self.matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # Nesterov
        torch._foreach_mul_(list(self.matrices.values()), 1 - rate * self.weight_decay)
        by_size: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
        for parameter, gradient in zip(self.matrices.values(), gradients, strict=True):
            rows, columns = sorted(parameter.shape[-2:])
            by_size[rows, columns].append((parameter, gradient))
        for (_, columns), members in by_size.items():
            stacked = torch.cat([_wide(gradient) for _, gradient in members])
            update = newton_schulz(stacked.bfloat16() if stacked.is_cuda else stacked)
            pieces = update.split([_wide(gradient).shape[0] for _, gradient in members])
            for (parameter, _), piece in zip(members, pieces, strict=True):
                # An orthogonal matrix has RMS 1 / sqrt(columns).
                _wide(parameter).add_(piece.to(parameter.dtype), alpha=-rate * UPDATE_RMS * columns**0.5)

    def _step_vectors(self, rate: float) -> None:
        values: list[Tensor] = list(self.vectors.values())
        gradients = [_gradient(p) for p in self.vectors.values()]
        first, second = [self.first[name] for name in self.vectors], list(self.second.values())
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
        scale = torch._foreach_div(second, 1 - BETAS[1] ** self.steps)  # noqa: SLF001
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, EPSILON)
        decayed = [p for p in values if p.ndim >= 2]  # norms and biases are not
        torch._foreach_mul_(decayed, 1 - rate * self.weight_decay)
        torch._foreach_addcdiv_(values, first, scale, -rate / (1 - BETAS[0] ** self.steps))

    def tensors(self) -> dict[str, Tensor]:
        """Views, not copies: writing into them restores a state (with `steps`)."""
        return {f"first.{n}": t for n, t in self.first.items()} | {f"second.{n}": t for n, t in self.second.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, f"a parameter of shape {tuple(parameter.shape)} took no part in the loss"
    return parameter.grad


def _wide(matrix: Tensor) -> Tensor:
    """As [n, rows, columns] with rows <= columns, a view."""
    stacked = matrix.view(-1, *matrix.shape[-2:])
    return stacked.mT if stacked.shape[-2] > stacked.shape[-1] else stacked
