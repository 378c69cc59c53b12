"""The routers of a model and the norms around them: what lookahead applies to a state that it has instead of the state
that will be. L MoE layers, E experts, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.model.moe import MoeWeights
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Routers:
    """One entry per MoE layer; views of the model's own weights where its dtype allows it."""

    weights: tuple[Tensor, ...]  # [E, H] each
    biases: tuple[Tensor, ...] | None  # [E] each; None: the family has none
    norms: tuple[Tensor, ...]  # [H] each: in front of the MoE
    input_norms: tuple[Tensor, ...]  # [H] each: in front of the attention
    eps: float
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.weights)

    @property
    def experts(self) -> int:
        return len(self.weights[0])

    @property
    def hidden(self) -> int:
        return self.weights[0].shape[1]

    def normed(self, layer: int, state: Tensor) -> Tensor:
        """[R, H] → [R, H] fp32: what the router of `layer` would be given if `state` were its residual."""
        return _rms_norm(state, self.norms[layer], self.eps)

    def input_normed(self, layer: int, state: Tensor) -> Tensor:
        """[R, H] → [R, H] fp32: what the attention of `layer` is given when `state` enters it."""
        return _rms_norm(state, self.input_norms[layer], self.eps)

    def logits(self, layer: int, normed: Tensor) -> Tensor:
        """[R, H] → [R, E] fp32."""
        bias = None if self.biases is None else self.biases[layer].float()
        return F.linear(normed, self.weights[layer].float(), bias)

    def to(self, device: torch.device | str) -> "Routers":
        return self._mapped(lambda tensor: tensor.to(device))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Routers":
        def each(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(change(tensor) for tensor in tensors)

        biases = None if self.biases is None else each(self.biases)
        return Routers(each(self.weights), biases, each(self.norms), each(self.input_norms), self.eps, self.top_k)


def routers_of_weights(spec: ModelSpec, weights: ModelWeights) -> Routers:
    """Of our own decoder. Shares the weights' memory."""
    layers = [weights.layers[index] for index in spec.moe_layers]
    mlps = [layer.mlp for layer in layers]
    return Routers(
        tuple(mlp.router for mlp in mlps if isinstance(mlp, MoeWeights)),
        None,
        tuple(layer.mlp_norm for layer in layers),
        tuple(layer.input_norm for layer in layers),
        spec.norm_eps,
        spec.moe(spec.moe_layers[0]).top_k,
    )


def _rms_norm(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = state.float()
    return weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))
