"""How often each expert is routed to, whatever happens: the static baseline. L layers, E experts."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor

HORIZONS = (0, 1, 2, 3)


class Frequency(StoredPredictor):
    kind = "frequency"

    def __init__(self, rates: Tensor, horizons: Sequence[int] = HORIZONS) -> None:
        """`rates` [L, E]: share of the tokens that are routed to each expert."""
        self.rates = rates
        self.horizons = tuple(horizons)

    def probabilities(self, sight: Sight) -> Tensor:
        return self.rates[sight.decision.target].float().expand(sight.rows, -1)

    def cost(self) -> Cost:
        return Cost(self.parameters(), 0)

    def config(self) -> dict[str, Any]:
        return {"horizons": list(self.horizons)}

    def tensors(self) -> dict[str, Tensor]:
        return {"rates": self.rates}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        return cls(tensors["rates"], config["horizons"])
