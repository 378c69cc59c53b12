"""A reuse forecast whose arithmetic runs at a benchmark's shape, and whose answers are the recorded ones."""

from collections.abc import Sequence

import torch

from steerpipe.bench.prediction import ToldReuse
from steerpipe.bench.shapes import Shape
from steerpipe.model.gpu.reuse import ReuseBranch, ReuseMap

RANK = 128


class Heard(ToldReuse):
    """Hears a branch as the engine's policy does, and is told what was recorded. A ReuseListener."""

    branch: ReuseBranch
    heard = 0

    def begin(self, *, again: bool) -> bool:
        return True

    def forget(self) -> None:
        pass

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        super().touch_many(numbers, now)
        self.heard += self.branch.newest() is not None


def made_up_reuse(shape: Shape, taps: tuple[int, ...], device: torch.device) -> ReuseMap:
    """Of the shipped forecast's size, with weights that mean nothing."""
    count, inputs = shape.all_experts, 2 * shape.spec.hidden

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device) * sizes[-1] ** -0.5

    return ReuseMap(
        taps, drawn(len(taps), RANK, inputs).half(), drawn(len(taps), RANK).half(), drawn(1, count, RANK).half(),
        drawn(len(taps), count), 0.84,
    )  # fmt: skip
