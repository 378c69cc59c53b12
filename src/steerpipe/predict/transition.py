"""Co-activation: the experts of the decision layer vote for those of the target layer. L layers, E experts."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor


class Transition(StoredPredictor):
    """Naive Bayes: log odds of the target's experts plus what each expert of the decision layer adds to them.

    Votes of experts that fire together are counted twice by that rule, so a scale per layer (learnt) takes it back.
    """

    kind = "transition"

    def __init__(self, prior: Tensor, votes: Tensor, scale: Tensor, horizons: Sequence[int]) -> None:
        """prior [L, E]: log odds; votes [horizons, L, E decided, E target]; scale [horizons, L]."""
        self.prior = prior
        self.votes = votes
        self.scale = scale
        self.horizons = tuple(horizons)

    def probabilities(self, sight: Sight) -> Tensor:
        number, target = self.horizons.index(sight.decision.horizon), sight.decision.target
        votes = self.votes[number, target].float()[sight.experts(sight.layer)].sum(1)  # [R, k, E] → [R, E]
        return torch.sigmoid(self.prior[target].float() + self.scale[number, target].float() * votes)

    def cost(self) -> Cost:
        return Cost(self.parameters(), self.votes.shape[-1])

    def config(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons)}

    def tensors(self) -> dict[str, Tensor]:
        return {"prior": self.prior, "votes": self.votes, "scale": self.scale}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        return cls(tensors["prior"], tensors["votes"], tensors["scale"], config["horizons"])
