"""The estimator of Speculating Experts: one small network for all layers on the quasi state, and the hybrid of both.

    logits = W2 · silu(W1 · (q + embedding_t) + b1) + b2 + c_t        q: quasi state through the target's norm

It is trained by KL to the true router's distribution. L layers, E experts, H hidden, W width.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steerpipe.predict.calibration import Calibration
from steerpipe.predict.logits import LayeredNetwork, LogitPredictor, NetworkPredictor, fill_network, restore_calibration
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead, quasi_state
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import needed


class EstimatorNetwork(LayeredNetwork):
    """Only the embedding and the last bias know the layer."""

    def __init__(self, routers: Routers, *, width: int, shared: bool, defaults: DefaultVectors | None) -> None:
        super().__init__()
        self._routers = routers
        self.width = width
        self.shared = shared
        device = routers.weights[0].device
        self.register_buffer("vectors", None if defaults is None else defaults.vectors)
        self.register_buffer("counts", None if defaults is None else defaults.counts)
        self.embedding = nn.Parameter(torch.randn(routers.layers, routers.hidden, device=device) * 0.1)
        self.first = nn.Linear(routers.hidden, width, device=device)
        self.second = nn.Linear(width, routers.experts, device=device)
        self.bias = nn.Parameter(torch.zeros(routers.layers, routers.experts, device=device))

    @property
    def defaults(self) -> DefaultVectors | None:
        vectors, counts = self._buffers["vectors"], self._buffers["counts"]
        return None if vectors is None or counts is None else DefaultVectors(vectors, counts)

    def gather(self, sight: Sight) -> tuple[Tensor, ...]:
        state = quasi_state(sight, shared=self.shared, defaults=self.defaults)
        return (self._routers.normed(sight.decision.target, state),)

    def forward(self, gathered: tuple[Tensor, ...], targets: slice) -> Tensor:
        (q,) = gathered  # [T, R, H]
        hidden = F.silu(self.first(q + self.embedding[targets, None]))  # [T, R, W]
        scores: Tensor = self.second(hidden)
        return scores + self.bias[targets, None]

    def config(self) -> dict[str, Any]:
        return {"width": self.width, "shared": self.shared, "defaults": self.defaults is not None}


class Estimator(NetworkPredictor):
    kind = "estimator"
    network: EstimatorNetwork

    def cost(self) -> Cost:
        per_width = self.routers.hidden + self.routers.experts
        return Cost(self.parameters(), self.network.width * per_width)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        own = needed(routers, cls.kind)
        defaults = (
            DefaultVectors(tensors["network.vectors"].float(), tensors["network.counts"])
            if config["defaults"]
            else None
        )
        network = EstimatorNetwork(own, width=config["width"], shared=config["shared"], defaults=defaults)
        fill_network(network, tensors)
        return cls(network, own, config["horizon"], restore_calibration(tensors))


class Hybrid(LogitPredictor):
    """The estimator in the layers that drift, the model's own router in the others."""

    kind = "hybrid"

    def __init__(self, estimator: Estimator, drifting: Sequence[int], calibration: Calibration) -> None:
        """`drifting`: target layers; the lookahead in the others has the estimator's quasi state."""
        self.estimator = estimator
        self.drifting = tuple(drifting)
        self.routers = estimator.routers
        self.horizons = estimator.horizons
        self.calibration = calibration
        network = estimator.network
        self.lookahead = RouterLookahead(
            self.routers, shared=network.shared, defaults=network.defaults, horizons=self.horizons
        )

    def logits(self, sight: Sight) -> Tensor:
        own = self.estimator if sight.decision.target in self.drifting else self.lookahead
        return own.logits(sight)

    def cost(self) -> Cost:
        share = len(self.drifting) / self.routers.layers
        estimated, looked = self.estimator.cost().multiply_adds, self.lookahead.cost().multiply_adds
        return Cost(self.parameters(), round(share * estimated + (1 - share) * looked))

    def config(self) -> dict[str, Any]:
        return {"drifting": list(self.drifting), "estimator": self.estimator.config()}

    def tensors(self) -> dict[str, Tensor]:
        own = {f"estimator.{name}": value for name, value in self.estimator.tensors().items()}
        return own | self.calibration_tensors()

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        inner = {name.removeprefix("estimator."): value for name, value in tensors.items() if name.startswith("estim")}
        estimator = Estimator.restore(config["estimator"], inner, routers)
        return cls(estimator, config["drifting"], restore_calibration(tensors))
