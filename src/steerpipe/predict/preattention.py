"""The pre-attention predictor as published (arXiv 2511.10676): a network of its own for every layer, on what the
layer's attention is given, so that one attention hides the transfer. Two architectures:

    silu        Linear(H, 2048) · SiLU · Linear(2048, E)
    batchnorm   Linear(H, 2048) · BatchNorm · GELU · Linear(2048, E)

T target layers, L layers, R rows, E experts, H hidden, W width.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steerpipe.predict.logits import LayeredNetwork, NetworkPredictor, fill_network, restore_calibration
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import needed

WIDTH = 2048
_MOMENTUM = 0.1  # of the running statistics, as in nn.BatchNorm1d
_EPS = 1e-5


class Architecture(StrEnum):
    SILU = "silu"
    BATCHNORM = "batchnorm"


class PreAttentionNetwork(LayeredNetwork):
    def __init__(self, routers: Routers, *, architecture: Architecture, width: int = WIDTH) -> None:
        super().__init__()
        self._routers = routers
        self.architecture = architecture
        self.width = width
        layers, hidden, experts = routers.layers, routers.hidden, routers.experts
        device = routers.weights[0].device

        def uniform(*shape: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device).uniform_(-(inputs**-0.5), inputs**-0.5))

        self.first = uniform(layers, width, hidden, inputs=hidden)
        self.first_bias = uniform(layers, width, inputs=hidden)
        self.second = uniform(layers, experts, width, inputs=width)
        self.second_bias = uniform(layers, experts, inputs=width)
        if architecture is Architecture.BATCHNORM:
            self.gain = nn.Parameter(torch.ones(layers, width, device=device))
            self.shift = nn.Parameter(torch.zeros(layers, width, device=device))
            self.register_buffer("mean", torch.zeros(layers, width, device=device))
            self.register_buffer("variance", torch.ones(layers, width, device=device))

    def gather(self, sight: Sight) -> tuple[Tensor, ...]:
        target = sight.decision.target
        return (self._routers.input_normed(target, sight.entering(target)),)

    def forward(self, gathered: tuple[Tensor, ...], targets: slice) -> Tensor:
        (x,) = gathered  # [T, R, H]
        hidden = torch.baddbmm(self.first_bias[targets, None], x, self.first[targets].mT)  # [T, R, W]
        hidden = F.silu(hidden) if self.architecture is Architecture.SILU else F.gelu(self._normalised(hidden, targets))
        return torch.baddbmm(self.second_bias[targets, None], hidden, self.second[targets].mT)

    def _normalised(self, hidden: Tensor, targets: slice) -> Tensor:
        """Batch normalisation over the rows, in fp32; running statistics when not training."""
        assert isinstance(self.mean, Tensor) and isinstance(self.variance, Tensor), "buffers are tensors"
        mean, variance = self.mean[targets], self.variance[targets]
        hidden = hidden.float()
        if self.training:
            own_variance, own_mean = torch.var_mean(hidden, dim=1, correction=0)
            rows = hidden.shape[1]
            with torch.no_grad():
                mean.lerp_(own_mean, _MOMENTUM)
                variance.lerp_(own_variance * rows / (rows - 1), _MOMENTUM)
            mean, variance = own_mean, own_variance
        scale = self.gain[targets] * torch.rsqrt(variance + _EPS)  # [T, W]
        return (hidden - mean[:, None]) * scale[:, None] + self.shift[targets, None]

    def config(self) -> dict[str, Any]:
        return {"architecture": str(self.architecture), "width": self.width}


class PreAttention(NetworkPredictor):
    kind = "preattention"
    network: PreAttentionNetwork

    @property
    def name(self) -> str:
        return f"pre-attention ({self.network.architecture})"

    def cost(self) -> Cost:
        return Cost(self.parameters(), self.network.width * (self.routers.hidden + self.routers.experts))

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        own = needed(routers, cls.kind)
        network = PreAttentionNetwork(own, architecture=Architecture(config["architecture"]), width=config["width"])
        fill_network(network, tensors)
        return cls(network, own, config["horizon"], restore_calibration(tensors))
