"""Logistic regression of few weights on many decisions, by Newton: no rate, no seed. n decisions, P columns."""

import torch
from torch import Tensor

_STEPS = 20
_RIDGE = 1e-6  # per decision: keeps columns that say the same apart


def logistic(columns: Tensor, wanted: Tensor, start: Tensor) -> Tensor:
    """[P]: weights of the least cross entropy between sigmoid(columns [n, P] · weights) and `wanted` [n]."""
    x, y, weights = columns.double(), wanted.double(), start.double()
    ridge = _RIDGE * len(y) * torch.eye(len(weights), dtype=x.dtype, device=x.device)
    for _ in range(_STEPS):
        said = torch.sigmoid(x @ weights)
        slope = x.T @ (said - y)
        bend = (x * (said * (1 - said))[:, None]).T @ x
        weights = weights - torch.linalg.solve(bend + ridge, slope).clamp(
            -2, 2
        )  # a whole step may leap over the answer
    return weights.float()


def logistic_line(x: Tensor, y: Tensor) -> Tensor:
    """[2]: scale and bias of the least cross entropy between sigmoid(scale · x + bias) and y, of one shape."""
    columns = torch.stack([x.flatten(), torch.ones(x.numel(), device=x.device)], dim=1)
    return logistic(columns, y.flatten(), torch.tensor([1.0, 0.0], device=x.device))
