"""The experts of the token before, in the same layer. L layers, E experts."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from steerpipe.predict.frequency import HORIZONS
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor


def last_routed(sight: Sight) -> Tensor:
    """[R, E] fp32: the newest routing of the target layer that exists at the decision; zeros before the first."""
    return sight.hot(sight.decision.target, back=0 if sight.crosses else 1)


class PreviousToken(StoredPredictor):
    kind = "previous"

    def __init__(self, stays: Tensor, comes: Tensor, horizons: Sequence[int] = HORIZONS) -> None:
        """[L, E] each: how often an expert is routed to after a token that used it, and after one that did not."""
        self.stays = stays
        self.comes = comes
        self.horizons = tuple(horizons)

    def probabilities(self, sight: Sight) -> Tensor:
        target = sight.decision.target
        return torch.where(last_routed(sight) > 0, self.stays[target].float(), self.comes[target].float())

    def cost(self) -> Cost:
        return Cost(self.parameters(), 0)

    def config(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons)}

    def tensors(self) -> dict[str, Tensor]:
        return {"stays": self.stays, "comes": self.comes}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        return cls(tensors["stays"], tensors["comes"], config["horizons"])
