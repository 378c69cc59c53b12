"""What the predictors that score experts like a router share: calibration, and networks that cover every layer at once.

T target layers, R rows, E experts, L layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steerpipe.predict.calibration import Calibration
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import StoredPredictor


class LogitPredictor(StoredPredictor):
    """Ranks by logits; a calibration makes probabilities of them."""

    routers: Routers
    calibration: Calibration

    @abstractmethod
    def logits(self, sight: Sight) -> Tensor:
        """[R, E] fp32, comparable within a row."""

    @torch.no_grad()
    def probabilities(self, sight: Sight) -> Tensor:
        number = self.horizons.index(sight.decision.horizon)
        return self.calibration.probabilities(self.logits(sight), self.routers.top_k, number, sight.decision.target)

    def calibration_tensors(self) -> dict[str, Tensor]:
        return {"calibration.scale": self.calibration.scale, "calibration.bias": self.calibration.bias}


class LayeredNetwork(nn.Module, ABC):
    """A network with weights of its own for every target layer, in stacks, so that one product trains them all."""

    @abstractmethod
    def gather(self, sight: Sight) -> tuple[Tensor, ...]:
        """What it takes from one decision: [R, ...] each."""

    @abstractmethod
    def forward(self, gathered: tuple[Tensor, ...], targets: slice) -> Tensor:
        """`gathered` of the layers `targets`, stacked: [T, R, ...] each → logits [T, R, E]."""

    @abstractmethod
    def config(self) -> dict[str, Any]: ...


class NetworkPredictor(LogitPredictor):
    """A layered network at one horizon."""

    network: LayeredNetwork

    def __init__(self, network: LayeredNetwork, routers: Routers, horizon: int, calibration: Calibration) -> None:
        self.network = network.eval().requires_grad_(False)
        self.routers = routers
        self.horizons = (horizon,)
        self.calibration = calibration

    def logits(self, sight: Sight) -> Tensor:
        target = sight.decision.target
        gathered = tuple(each[None] for each in self.network.gather(sight))
        scores: Tensor = self.network(gathered, slice(target, target + 1))
        return scores[0]

    def config(self) -> dict[str, Any]:
        return {"horizon": self.horizons[0], **self.network.config()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"network.{name}": value for name, value in self.network.state_dict().items()} | (
            self.calibration_tensors()
        )


def restore_calibration(tensors: Mapping[str, Tensor]) -> Calibration:
    return Calibration(tensors["calibration.scale"].float(), tensors["calibration.bias"].float())


def fill_network(network: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "network.") -> None:
    """Gives a network (built on any device, meta too) the tensors of a file, as fp32, wherever they lie."""
    own = {
        name.removeprefix(prefix): value.float() if value.is_floating_point() else value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    network.load_state_dict(own, assign=True)
