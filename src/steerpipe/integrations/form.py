"""How the experts of one transformers module lie in memory and in a block: pure but for looking at parameters.

A block holds one expert's slice of each of the module's parameters, bit for bit, in its own dtype and strides. Parts
start at multiples of 64 bytes, blocks are multiples of 4 KiB. Legend: E experts, H hidden, I expert width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.store.layout import PAGE_BYTES, PART_ALIGNMENT_BYTES

_SIGNS = ("num_experts", "has_gate", "has_bias", "is_transposed")  # what transformers' decorator sets on experts
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FAMILIES = "use a model whose experts transformers can replace (docs/transformers.md names the families)"


class ExpertsModule(Protocol):
    """What transformers' decorator makes of a class of experts; every one of them is an nn.Module."""

    num_experts: int
    has_gate: bool  # gate_up_proj with `_apply_gate`, or up_proj with `act_fn`
    has_bias: bool
    is_transposed: bool  # matrices are [in, out] instead of [out, in]
    training: bool
    config: PreTrainedConfig

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]: ...
    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...
    def act_fn(self, up: Tensor) -> Tensor: ...
    def post_expert_norm(self, out: Tensor) -> Tensor: ...
    def forward(self, hidden: Tensor, index: Tensor, gates: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """One expert's part of a parameter [E, ...]."""

    name: str  # of the module's parameter
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # in the block

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Of every expert of one module."""

    experts: int
    slices: tuple[Slice, ...]
    block_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the first matrix, which is the input's too."""
        return self.slices[0].dtype

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The parameters of the expert whose block lies in `memory` (uint8), by name; they share its bytes."""
        found = {}
        for part in self.slices:
            flat = memory[part.offset : part.offset + part.size_bytes].view(part.dtype)
            found[part.name] = flat.as_strided(part.shape, part.stride)
        return found


def find_experts(model: object) -> dict[str, ExpertsModule]:
    """The modules that hold experts, by name, in the order in which they are computed. ConfigError: there are none."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model", fix="give the model that from_pretrained returned"
        )
    found = {
        name: cast("ExpertsModule", module)
        for name, module in model.named_modules()
        if all(hasattr(module, sign) for sign in _SIGNS)
    }
    if not found:
        raise ConfigError(f"{type(model).__name__} has no experts that transformers can replace", fix=_FAMILIES)
    return found


def parameter_names(module: ExpertsModule) -> tuple[str, ...]:
    """What is multiplied first comes first: a prefetch is a prefix of a block."""
    matrices = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return tuple(part for name in matrices for part in ((name, f"{name}_bias") if module.has_bias else (name,)))


def form_of(name: str, module: ExpertsModule) -> ExpertForm:
    """The form of a module's experts. UnsupportedConfigError: it has others than those that transformers declares."""
    parameters: Mapping[str, Tensor] = dict(module.named_parameters(recurse=False))
    expected, experts = parameter_names(module), module.num_experts
    usual = all(each.shape[0] == experts and each.dtype in _DTYPES for each in parameters.values())
    if set(parameters) != set(expected) or not usual:
        shapes = ", ".join(f"{key} {list(each.shape)} {each.dtype}" for key, each in parameters.items()) or "nothing"
        raise UnsupportedConfigError(
            f"{name} ({type(module).__name__}) holds {shapes} instead of {', '.join(expected)} of {experts} experts",
            fix="load the model without quantisation or adapters, as float32, bfloat16 or float16",
        )
    if getattr(module, "_is_expert_parallel", False):
        raise UnsupportedConfigError(f"{name} has only a part of its experts", fix="load without expert parallelism")
    slices = tuple(_place((key, parameters[key]) for key in expected))
    end = slices[-1].offset + slices[-1].size_bytes
    return ExpertForm(experts, slices, -(-end // PAGE_BYTES) * PAGE_BYTES)


def _place(parameters: Iterator[tuple[str, Tensor]]) -> Iterator[Slice]:
    offset = 0
    for name, parameter in parameters:
        one = parameter[0]
        packed = torch.empty_like(one, device="meta")  # its own strides if they leave no gaps, else row after row
        part = Slice(name, tuple(one.shape), packed.stride(), one.dtype, offset)
        yield part
        offset = -(-(offset + part.size_bytes) // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
