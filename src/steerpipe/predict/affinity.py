"""Which experts a token is routed to by itself: token → experts. V tokens of the vocabulary, L layers, E experts.

Where the decision is taken in the token before, the token is not known; the one before it then speaks for what follows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from steerpipe.predict.frequency import HORIZONS
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor


class TokenAffinity(StoredPredictor):
    kind = "affinity"

    def __init__(self, own: Tensor, following: Tensor, rates: Tensor, horizons: Sequence[int] = HORIZONS) -> None:
        """own [V, A, E]: rates of the first A layers given the token; following [V, B, E]: given the token before;
        rates [L, E]: of layers beyond."""
        self.own = own
        self.following = following
        self.rates = rates
        self.horizons = tuple(horizons)

    def probabilities(self, sight: Sight) -> Tensor:
        target = sight.decision.target
        table = self.following if sight.crosses else self.own
        if target >= table.shape[1]:
            return self.rates[target].float().expand(sight.rows, -1)
        return table[sight.tokens(), target].float()

    def cost(self) -> Cost:
        return Cost(self.parameters(), 0)

    def config(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons)}

    def tensors(self) -> dict[str, Tensor]:
        return {"own": self.own, "following": self.following, "rates": self.rates}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        return cls(tensors["own"], tensors["following"], tensors["rates"], config["horizons"])
