"""Our own: a router that learns to look ahead. The target's router on what exists at the decision, plus a low-rank
correction that starts at nothing:

    logits = Router_t(q) + U · silu(V · x + b) + c        U = 0 and c = 0 before training

q: quasi state without default vectors (`lookahead`); x: q again, the gates of the decision layer (from which V learns
default vectors of its own), and of the token before the target's routing and residual, which tell of the attention
to come. T target layers, L layers, R rows, E experts, H hidden, D inputs, r rank.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steerpipe.predict.logits import LayeredNetwork, NetworkPredictor, fill_network, restore_calibration
from steerpipe.predict.lookahead import quasi_state
from steerpipe.predict.previous import last_routed
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import needed


class Input(StrEnum):
    """What the correction is given, besides q."""

    GATES = "gates"  # of the newest layer that has routed
    PREVIOUS_EXPERTS = "previous_experts"  # of the target layer, in the newest token that has passed it
    PREVIOUS_RESIDUAL = "previous_residual"  # the same token's residual there, through the target's norm


ALL_INPUTS = tuple(Input)


class HeadNetwork(LayeredNetwork):
    def __init__(self, routers: Routers, *, rank: int, shared: bool, inputs: Sequence[Input] = ALL_INPUTS) -> None:
        """`shared`: q has the shared expert's output, which the family must have."""
        super().__init__()
        self._routers = routers
        self.rank = rank
        self.shared = shared
        self.inputs = tuple(inputs)
        layers, experts, width = routers.layers, routers.experts, input_width(routers, self.inputs)
        device = routers.weights[0].device
        spread = width**-0.5
        self.down = nn.Parameter(torch.empty(layers, rank, width, device=device).uniform_(-spread, spread))
        self.down_bias = nn.Parameter(torch.zeros(layers, rank, device=device))
        self.up = nn.Parameter(torch.zeros(layers, experts, rank, device=device))
        self.up_bias = nn.Parameter(torch.zeros(layers, experts, device=device))

    def gather(self, sight: Sight) -> tuple[Tensor, ...]:
        """(q [R, H], x [R, D], the router's logits [R, E])."""
        target = sight.decision.target
        normed = self._routers.normed(target, quasi_state(sight, shared=self.shared, defaults=None))
        parts = [normed]
        if Input.GATES in self.inputs:
            parts.append(_newest_gates(sight))
        if Input.PREVIOUS_EXPERTS in self.inputs:
            parts.append(last_routed(sight))
        if Input.PREVIOUS_RESIDUAL in self.inputs:
            before = sight.residual(target, back=0 if sight.crosses else 1)
            parts.append(self._routers.normed(target, before))
        return torch.cat(parts, dim=1), self._routers.logits(target, normed)

    def forward(self, gathered: tuple[Tensor, ...], targets: slice) -> Tensor:
        x, routed = gathered  # [T, R, D], [T, R, E]
        hidden = F.silu(torch.baddbmm(self.down_bias[targets, None], x, self.down[targets].mT))  # [T, R, r]
        return routed + torch.baddbmm(self.up_bias[targets, None], hidden, self.up[targets].mT)

    def config(self) -> dict[str, Any]:
        return {"rank": self.rank, "shared": self.shared, "inputs": [str(each) for each in self.inputs]}


class ResidualHead(NetworkPredictor):
    """A HeadNetwork at one horizon."""

    kind = "head"
    network: HeadNetwork

    @property
    def name(self) -> str:
        return "head" if self.horizons[0] else "head, pre-attention"

    def cost(self) -> Cost:
        routers, network = self.routers, self.network
        own = network.rank * (input_width(routers, network.inputs) + routers.experts)
        return Cost(self.parameters(), own + routers.experts * routers.hidden)

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        own = needed(routers, cls.kind)
        inputs = [Input(each) for each in config["inputs"]]
        network = HeadNetwork(own, rank=config["rank"], shared=config["shared"], inputs=inputs)
        fill_network(network, tensors)
        return cls(network, own, config["horizon"], restore_calibration(tensors))


def input_width(routers: Routers, inputs: Sequence[Input]) -> int:
    widths = {
        Input.GATES: routers.experts, Input.PREVIOUS_EXPERTS: routers.experts, Input.PREVIOUS_RESIDUAL: routers.hidden,
    }  # fmt: skip
    return routers.hidden + sum(widths[each] for each in inputs)


def _newest_gates(sight: Sight) -> Tensor:
    """[R, E] of the newest layer that has routed; nothing before the first."""
    newest = sight.layer if sight.decision.horizon else sight.layer - 1
    if newest < 0:
        return torch.zeros(sight.rows, sight.geometry.experts, device=sight.device)
    return sight.gates(newest)
