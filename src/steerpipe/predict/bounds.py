"""What no predictor can beat, and what every predictor must: bounds, not products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from steerpipe.predict.protocol import Cost
from steerpipe.predict.sight import Sight

NOTHING = Cost(parameters=0, multiply_adds=0)


class Oracle:
    """Reads the answer."""

    name = "oracle"

    def __init__(self, horizons: Sequence[int] = (0, 1, 2, 3)) -> None:
        self.horizons = tuple(horizons)

    def probabilities(self, sight: Sight) -> Tensor:
        return sight.truth()

    def cost(self) -> Cost:
        return NOTHING


class Random:
    """Draws. The same decision with as many rows is drawn the same way again."""

    name = "random"

    def __init__(self, horizons: Sequence[int] = (0, 1, 2, 3), seed: int = 0) -> None:
        self.horizons = tuple(horizons)
        self._seed = seed

    def probabilities(self, sight: Sight) -> Tensor:
        generator = torch.Generator(sight.device)
        generator.manual_seed(hash((self._seed, sight.decision.target, sight.decision.horizon)) % 2**63)
        return torch.rand(sight.rows, sight.geometry.experts, generator=generator, device=sight.device)

    def cost(self) -> Cost:
        return NOTHING
