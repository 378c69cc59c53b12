"""The routers of a transformers model. E experts, H hidden."""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.routers import Routers
from steerpipe.trace.live import read_geometry
from steerpipe.trace.seams import Seam, find_seams

LEAST_AGREEMENT = 0.97  # of the traced choices; nano's own routers on 16-bit states give .997
_CHECKED_ROWS = 4096
_NORMS = ("input_layernorm", "post_attention_layernorm")  # before the attention, and before the MoE


def routers_of_model(model: PreTrainedModel) -> Routers:
    """Copies of the weights, fp32. ConfigError: a family whose routers are not one linear layer behind an RMS norm."""
    geometry = read_geometry(model)
    found = [_router(seam, geometry.experts, geometry.hidden) for seam in find_seams(model)]
    biases = tuple(bias for _, bias in found if bias is not None)
    norms = [tuple(_norm(seam, name) for seam in find_seams(model)) for name in _NORMS]
    eps = getattr(model.config.get_text_config(), "rms_norm_eps", None)
    if eps is None or len(biases) not in (0, len(found)):
        raise _unknown("its norms or router biases are of another kind")
    weights = tuple(weight for weight, _ in found)
    return Routers(weights, biases or None, norms[1], norms[0], float(eps), geometry.top_k)


@torch.no_grad()
def check_routers(routers: Routers, trace: PackedTrace) -> float:
    """Share of the traced choices that the routers make again from the traced residuals. ConfigError: too few."""
    assert trace.states is not None, "routers are checked on hidden states"
    rows = torch.arange(min(trace.rows, _CHECKED_ROWS), device=trace.device)
    again = []
    for layer in range(routers.layers):
        logits = routers.logits(layer, routers.normed(layer, trace.states.residual[rows, layer]))
        again.append(trace.routed(rows, layer).gather(1, logits.topk(routers.top_k).indices).mean())
    agreement = float(torch.stack(again).mean())
    if agreement < LEAST_AGREEMENT:
        raise _unknown(f"its linear part alone makes only {agreement:.1%} of the choices again")
    return agreement


def _router(seam: Seam, experts: int, hidden: int) -> tuple[Tensor, Tensor | None]:
    inner = set(cast("nn.Module", seam.experts).modules())
    matches = [
        module
        for module in seam.block.modules()
        if module not in inner
        and isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.shape == (experts, hidden)
    ]
    if len(matches) != 1:
        raise _unknown(f"{seam.name} has {len(matches)} layers of {experts} x {hidden} beside its experts")
    bias = getattr(matches[0], "bias", None)
    return _copy(cast("Tensor", matches[0].weight)), _copy(bias) if isinstance(bias, Tensor) else None


def _norm(seam: Seam, name: str) -> Tensor:
    weight = getattr(getattr(seam.layer, name, None), "weight", None)
    if not isinstance(weight, Tensor):
        raise _unknown(f"{seam.name} has no {name}")
    return _copy(weight)


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().float().clone()


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        f"this model's routers are not understood: {why}",
        fix="train a predictor that needs none: frequency, previous, transition, affinity, mlp, lstm or transformer",
    )
