"""A calibrated blend of whatever exists at the decision: logistic regression on the log odds of its parts.

    probability = sigmoid(sum over parts i of w_ti · logit(p_i) + b_t)        apart for every target layer t

P parts, L layers, R rows, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor

LEAST = 1e-4  # a part's 0 and 1 are not taken at their word


class Blend(StoredPredictor):
    """At one horizon."""

    kind = "blend"

    def __init__(self, parts: Sequence[StoredPredictor], horizon: int, weights: Tensor, bias: Tensor) -> None:
        """weights [L, P]; bias [L]."""
        strangers = [part.name for part in parts if horizon not in part.horizons]
        if strangers:
            raise ConfigError(
                f"{', '.join(strangers)} cannot be blended at horizon {horizon}", fix="blend parts of the same horizon"
            )
        self.parts = tuple(parts)
        self.horizons = (horizon,)
        self.weights = weights
        self.bias = bias
        self.routers = next((part.routers for part in parts if part.routers is not None), None)

    def log_odds(self, sight: Sight) -> Tensor:
        """[R, E, P] of the parts."""
        return torch.stack([torch.logit(part.probabilities(sight), eps=LEAST) for part in self.parts], dim=-1)

    @torch.no_grad()
    def probabilities(self, sight: Sight) -> Tensor:
        target = sight.decision.target
        return torch.sigmoid(self.log_odds(sight) @ self.weights[target] + self.bias[target])

    def cost(self) -> Cost:
        own = self.weights.shape[1] * sum(1 for _ in self.parts)
        costs = [part.cost() for part in self.parts]
        return Cost(
            self.weights.numel() + self.bias.numel() + sum(cost.parameters for cost in costs),
            own + sum(cost.multiply_adds for cost in costs),
        )

    def config(self) -> dict[str, Any]:
        parts = [{"kind": part.kind, "config": part.config()} for part in self.parts]
        return {"horizon": self.horizons[0], "parts": parts}

    def tensors(self) -> dict[str, Tensor]:
        own = {"weights": self.weights, "bias": self.bias}
        for number, part in enumerate(self.parts):
            own |= {f"{number}.{name}": value for name, value in part.tensors().items()}
        return own

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        from steerpipe.predict.kinds import class_of  # knows every kind, this one too

        parts = []
        for number, said in enumerate(config["parts"]):
            prefix = f"{number}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            parts.append(class_of(said["kind"]).restore(said["config"], own, routers))
        return cls(parts, config["horizon"], tensors["weights"].float(), tensors["bias"].float())
