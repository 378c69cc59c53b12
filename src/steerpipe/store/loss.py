"""What packing cost, as numbers: relative error by kind of matrix, and bits per weight."""

import math
from dataclasses import dataclass

from torch import Tensor

KINDS = ("gate", "up", "down", "dense")


@dataclass(frozen=True, slots=True)
class SquareSums:
    """Sums over weights of (packed - weight)^2 and of weight^2; added in the order on disk, so always the same bits."""

    error: float = 0.0
    weight: float = 0.0

    def __add__(self, other: "SquareSums") -> "SquareSums":
        return SquareSums(self.error + other.error, self.weight + other.weight)

    @property
    def relative_rms(self) -> float:
        return math.sqrt(self.error / self.weight) if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class QuantReport:
    """Relative RMS error by kind (`gate`, `up`, `down`, `dense`), and what a weight takes on disk."""

    relative_rms: dict[str, float]
    expert_bits_per_weight: float  # codes and scales
    expert_bits_per_weight_on_disk: float  # with the padding to 4 KiB
    dense_bits_per_weight: float

    @property
    def lossless(self) -> bool:
        return not any(self.relative_rms.values())


def square_sums(weight: Tensor, packed: Tensor) -> SquareSums:
    """Sums in float64; blocks."""
    exact, stored = weight.double(), packed.double()
    return SquareSums(float((stored - exact).square().sum()), float(exact.square().sum()))
