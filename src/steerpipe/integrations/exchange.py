"""Experts out of a model's modules and back. What is taken leaves a meta tensor behind: a shape without memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.integrations.blocks import BlockFile, BlockWriter
from steerpipe.integrations.compute import BINDING
from steerpipe.integrations.form import ExpertForm, ExpertsModule, find_experts, form_of


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One module with experts, and how they lie."""

    name: str
    module: ExpertsModule
    form: ExpertForm

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(recurse=False))


def expert_layers(model: object) -> tuple[ExpertLayer, ...]:
    """The layers of a model, in the order in which they are computed. ConfigError or UnsupportedConfigError: not ours.

    They may be on the meta device.
    """
    layers = tuple(ExpertLayer(name, module, form_of(name, module)) for name, module in find_experts(model).items())
    if any(hasattr(layer.module, BINDING) for layer in layers):
        raise ConfigError("the model is attached already", fix="detach it first, or go on with what is attached")
    parameters = [parameter for layer in layers for parameter in layer.parameters().values()]
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedConfigError("layers of the model share experts", fix="run this model without steerpipe")
    return layers


def experts_device(layers: Sequence[ExpertLayer]) -> torch.device:
    """Where the experts of a loaded model lie. ConfigError: nowhere, in more than one place, or not in RAM."""
    devices = {parameter.device for layer in layers for parameter in layer.parameters().values()}
    if torch.device("meta") in devices:
        raise ConfigError(
            "the model's experts are on the meta device: they have no weights",
            fix="load the model with from_pretrained, or give its folder to steerpipe.integrations.transformers.load",
        )
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model's experts lie on {named}", fix="load the model without device_map")
    (device,) = devices
    if device.type != "cpu":
        raise ConfigError(f"experts on {device} are not brought by the ladder yet", fix='call model.to("cpu")')
    return device


def write_experts(layers: Sequence[ExpertLayer], writer: BlockWriter) -> None:
    """Every expert as one block. Takes the memory of one block."""
    for number, layer in enumerate(layers):
        parameters = layer.parameters()
        block = torch.zeros(layer.form.block_bytes, dtype=torch.uint8)
        views = layer.form.views(block)
        for expert in range(layer.form.experts):
            for name, view in views.items():
                view.copy_(parameters[name].detach()[expert])
            writer.write(number, expert, block)


def strip(layers: Sequence[ExpertLayer]) -> None:
    """Replaces the parameters by meta tensors: their memory is free when nobody else holds them."""
    for layer in layers:
        for name, parameter in layer.parameters().items():
            _put(layer, name, torch.empty_like(parameter, device="meta"), parameter)


def restore(layers: Sequence[ExpertLayer], blocks: BlockFile, device: torch.device) -> None:
    """Reads every expert back into its module. TransferError or PackError: what could not be read stays on disk."""
    for number, layer in enumerate(layers):
        block = torch.empty(layer.form.block_bytes, dtype=torch.uint8)
        views = layer.form.views(block)
        empty = layer.parameters()
        whole = {  # in the dtype that was attached, whatever the model was cast to meanwhile
            name: torch.empty_like(parameter, device=device, dtype=views[name].dtype)
            for name, parameter in empty.items()
        }
        for expert in range(layer.form.experts):
            blocks.read_block(number, expert, block)
            for name, view in views.items():
                whole[name].detach()[expert].copy_(view)
        for name, tensor in whole.items():
            _put(layer, name, tensor, empty[name])


def _put(layer: ExpertLayer, name: str, tensor: Tensor, former: nn.Parameter) -> None:
    parameters: dict[str, nn.Parameter] = layer.module.__dict__["_parameters"]
    parameters[name] = nn.Parameter(tensor.detach(), requires_grad=former.requires_grad)
