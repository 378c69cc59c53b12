"""Where a transformers model can be watched: the modules of each MoE layer, found by what they are.

The experts are those of `integrations.form.find_experts`. Their parent is the MoE block, and the decoder layer is the
nearest module above it that stands in a ModuleList.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError
from steerpipe.integrations.form import ExpertsModule, find_experts

# A shared expert by its name in the MoE block or beside it, and the linear layer whose sigmoid switches it, if any.
_SHARED: Mapping[str, str | None] = MappingProxyType(
    {"shared_expert": "shared_expert_gate", "shared_experts": None, "shared_mlp": None}
)


@dataclass(frozen=True, slots=True)
class Seam:
    """One MoE layer."""

    name: str  # of the decoder layer
    experts: ExpertsModule
    block: nn.Module  # calls the router, then the experts
    layer: nn.Module
    norms: tuple[nn.Module, ...]  # of the layer; the one whose output the block is given is the norm in front of it


@dataclass(frozen=True, slots=True)
class SharedExpert:
    module: nn.Module
    switch: nn.Module | None  # its output's sigmoid is multiplied onto the shared expert's


def find_seams(model: PreTrainedModel) -> tuple[Seam, ...]:
    """The MoE layers in the order of the forward pass. ConfigError: there are none, or not where we look for them."""
    modules = dict(model.named_modules())
    found = []
    for name, experts in find_experts(model).items():
        layer = _decoder_layer(modules, name)
        norms = tuple(child for child in modules[layer].children() if "norm" in type(child).__name__.lower())
        found.append(Seam(layer, experts, modules[name.rpartition(".")[0]], modules[layer], norms))
    return tuple(found)


def _decoder_layer(modules: Mapping[str, nn.Module], name: str) -> str:
    while name:
        above = name.rpartition(".")[0]
        if isinstance(modules[above], nn.ModuleList):
            return name
        name = above
    raise ConfigError(
        "the model's experts are in no list of layers", fix="trace a decoder whose layers are in an nn.ModuleList"
    )


def shared_expert(seam: Seam) -> SharedExpert | None:
    """None: the layer has routed experts alone. ConfigError: one that we would not know how to add."""
    children = {
        name: child for place in (seam.block, seam.layer) for name, child in place.named_children() if "shared" in name
    }
    modules = [name for name in children if name in _SHARED]
    switches = {_SHARED[name] for name in modules} - {None}
    if children.keys() - {*modules, *switches} or len(modules) > 1:
        raise ConfigError(
            f"{seam.name} has {', '.join(sorted(children))}: which of them is the shared expert is not known",
            fix="trace this model without hidden states",
        )
    if not modules:
        return None
    switch = _SHARED[modules[0]]
    return SharedExpert(children[modules[0]], children.get(switch) if switch else None)
