"""Proof, before a module's experts are taken away, that our experts function gives the bits that its own would give.

Transformers has some sixty classes of experts that differ in small things, and every release brings more. So nothing
is assumed of a class: its own eager forward is the yardstick, on a few random tokens, at its own shapes and dtype.
Legend: T tokens, k experts per token, H hidden.
"""

import copy
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.integrations.compute import IMPLEMENTATION, ExpertSum, contribution, distinct
from steerpipe.integrations.form import ExpertForm, ExpertsModule, Slice

_TOKENS, _PER_TOKEN = 7, 3
_SHIFT = 64  # numbers from one made-up expert to the next: they overlap, so all of them take the memory of one


def settle_sums(name: str, module: ExpertsModule, form: ExpertForm, device: torch.device) -> bool:
    """Whether contributions are added in the routing weights' dtype: see BoundLayer. Takes the memory of one expert.

    UnsupportedConfigError: the module does something that we do not, so its bits would not be those of transformers.
    """
    parameters = {part.name: _overlapping(part, form.experts, device) for part in form.slices}
    yardstick: Any = copy.copy(module)
    yardstick.__dict__["_parameters"] = parameters
    yardstick.config = SimpleNamespace(_experts_implementation="eager")
    for in_gate_dtype in (False, True):
        if all(_agrees(yardstick, parameters, form, gates, in_gate_dtype) for gates in {form.dtype, torch.float32}):
            return in_gate_dtype
    raise UnsupportedConfigError(
        f"{name} ({type(module).__name__}) computes its experts in a way of its own: the same weights give other "
        f"numbers with {IMPLEMENTATION}",
        fix="run this model without steerpipe, and report the class, so that it can be added",
    )


@torch.no_grad()
def _agrees(
    module: ExpertsModule, parameters: dict[str, Tensor], form: ExpertForm, gate_dtype: torch.dtype, in_gate_dtype: bool
) -> bool:
    """Experts come in descending order here: sums must not care."""
    device, matrix = parameters[form.slices[0].name].device, form.slices[0].shape
    width = matrix[0] if module.is_transposed else matrix[1]
    hidden = _random((_TOKENS, width), 1).to(device, form.dtype)  # [T, H]
    index = _random((_TOKENS, form.experts), 2).topk(min(_PER_TOKEN, form.experts)).indices.to(device)  # [T, k]
    gates = _random(tuple(index.shape), 3).softmax(-1).to(device, gate_dtype)  # [T, k]
    routed = distinct(index, form.experts)
    total = ExpertSum(hidden, gates, routed, in_gate_dtype=in_gate_dtype)
    for expert in reversed(routed):
        one = {name: whole[expert] for name, whole in parameters.items()}
        total.add(expert, *contribution(module, one, hidden, index, gates, expert))
    return torch.equal(module.forward(hidden, index, gates), total.result)


def _overlapping(part: Slice, experts: int, device: torch.device) -> Tensor:
    """A parameter [E, ...] with the strides of the true one within an expert."""
    extent = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride, strict=True))
    scale = 1 / math.sqrt(part.shape[-1])
    memory = _random((extent + _SHIFT * (experts - 1),), extent) * scale
    return memory.to(device, part.dtype).as_strided((experts, *part.shape), (_SHIFT, *part.stride))


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same at every call, and nobody else's random numbers change."""
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))
