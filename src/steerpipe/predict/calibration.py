"""From router logits to probabilities that an expert is among the k: how far a logit lies above the cut decides.

R rows, E experts, L layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def margins(logits: Tensor, top_k: int) -> Tensor:
    """[..., E] → [..., E]: distance from the middle between the k-th and the next logit: > 0 for exactly k of them."""
    assert logits.shape[-1] > top_k, f"{top_k} of {logits.shape[-1]} experts leave nothing to predict"
    highest = logits.topk(top_k + 1, dim=-1).values
    return logits - highest[..., -2:].mean(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Probability = sigmoid(scale · margin + bias), for each horizon (as its predictor numbers them) and layer."""

    scale: Tensor  # [horizons, L]
    bias: Tensor  # [horizons, L]

    def probabilities(self, logits: Tensor, top_k: int, number: int, layer: int) -> Tensor:
        """[R, E] → [R, E]."""
        return torch.sigmoid(self.scale[number, layer] * margins(logits, top_k) + self.bias[number, layer])


def uncalibrated(horizons: int, layers: int) -> Calibration:
    """Logits taken at their word."""
    return Calibration(torch.ones(horizons, layers), torch.zeros(horizons, layers))
