"""Several predictors as one, each for the horizons it is best at."""

from collections.abc import Mapping

from torch import Tensor

from steerpipe.predict.protocol import Cost, RoutingPredictor
from steerpipe.predict.sight import Sight


class ByHorizon:
    """A RoutingPredictor that asks the one that is named for the horizon."""

    def __init__(self, name: str, predictors: Mapping[int, RoutingPredictor]) -> None:
        assert predictors, "nobody to ask"
        for horizon, predictor in predictors.items():
            assert horizon in predictor.horizons, f"{predictor.name} does not look {horizon} layers ahead"
        self.name = name
        self._of = dict(sorted(predictors.items()))
        self.horizons = tuple(self._of)

    def at(self, horizon: int) -> RoutingPredictor | None:
        """Who is asked that far ahead."""
        return self._of.get(horizon)

    def probabilities(self, sight: Sight) -> Tensor:
        return self._of[sight.decision.horizon].probabilities(sight)

    def cost(self) -> Cost:
        costs = [predictor.cost() for predictor in self._of.values()]
        return Cost(sum(each.parameters for each in costs), sum(each.multiply_adds for each in costs) // len(costs))
