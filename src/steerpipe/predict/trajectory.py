"""Routing history → experts, as the seed proposes: a network of its own for every (target layer, horizon)."""

from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from steerpipe.core.errors import ConfigError
from steerpipe.predict.logits import fill_network
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Decision, Sight
from steerpipe.predict.stored import StoredPredictor
from steerpipe.predict.trajectory_networks import Architecture, build, multiply_adds
from steerpipe.predict.window import STEPS, Window, read_window, window_length


class Trajectory(StoredPredictor):
    kind = "trajectory"

    def __init__(
        self,
        architecture: Architecture,
        experts: int,
        networks: Mapping[Decision, nn.Module],
        *,
        window: Window = Window.LAYERS,
        steps: int = STEPS,
        without: tuple[int, ...] = (),
    ) -> None:
        """`without`: layers of the window that are shown as zeros, to learn what they are worth."""
        self.architecture = architecture
        self.experts = experts
        self.networks = {decision: each.eval().requires_grad_(False) for decision, each in networks.items()}
        self.window = window
        self.steps = steps
        self.without = without
        self.horizons = tuple(sorted({decision.horizon for decision in networks}))

    @property
    def name(self) -> str:
        return f"{self.architecture} ({self.window})"

    @property
    def decisions(self) -> Collection[Decision]:
        return self.networks.keys()

    @torch.no_grad()
    def probabilities(self, sight: Sight) -> Tensor:
        network = self.networks.get(sight.decision)
        if network is None:
            raise ConfigError(
                f"this {self.architecture} was not trained for layer {sight.decision.target} at horizon "
                f"{sight.decision.horizon}",
                fix=f"ask for one of its {len(self.networks)} decisions, or train it for this one",
            )
        return torch.sigmoid(network(read_window(sight, self.window, self.steps, self.without)))

    def cost(self) -> Cost:
        length = window_length(self.window, self.steps)
        return Cost(self.parameters(), multiply_adds(self.architecture, self.experts, length))

    def config(self) -> dict[str, Any]:
        return {
            "architecture": str(self.architecture),
            "experts": self.experts,
            "window": str(self.window),
            "steps": self.steps,
            "without": list(self.without),
            "decisions": [[decision.target, decision.horizon] for decision in self.networks],
        }

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{_prefix(decision)}{name}": value
            for decision, network in self.networks.items()
            for name, value in network.state_dict().items()
        }

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        architecture, window = Architecture(config["architecture"]), Window(config["window"])
        networks = {}
        for target, horizon in config["decisions"]:
            decision = Decision(target, horizon)
            networks[decision] = build(architecture, config["experts"], window_length(window, config["steps"]))
            fill_network(networks[decision], tensors, _prefix(decision))
        return cls(
            architecture,
            config["experts"],
            networks,
            window=window,
            steps=config["steps"],
            without=tuple(config["without"]),
        )


def _prefix(decision: Decision) -> str:
    return f"{decision.target}.{decision.horizon}."
