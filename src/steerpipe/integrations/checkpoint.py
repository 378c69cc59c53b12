"""Experts straight from a checkpoint's files, one at a time, as transformers itself would convert them.

Most families store three matrices per expert, transformers computes with two tensors of all experts. How one becomes
the other is a list of operations that transformers keeps per family; here they are applied to one expert instead of
all. Legend: E experts.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from steerpipe.core.errors import TensorError, UnsupportedConfigError
from steerpipe.integrations.exchange import ExpertLayer
from steerpipe.model.safetensors import TensorEntry, read_tensor

_AXES = 3  # of a parameter [E, rows, columns]


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """What one parameter of all experts is made of."""

    target: str  # its name in the model
    experts: int
    parts: Mapping[str, tuple[TensorEntry, ...]]  # pattern → one tensor for each expert, or one for all of them
    converter: WeightConverter | None  # None: the tensor is the parameter

    def read(self, expert: int, model: PreTrainedModel) -> Tensor:
        """One expert's slice of the parameter, in the checkpoint's dtype. Reads the disk."""
        pieces = {pattern: self._piece(entries, expert) for pattern, entries in self.parts.items()}
        if self.converter is None:
            (whole,) = pieces.values()
            return whole[0]
        converter = copy.deepcopy(self.converter)
        for pattern, piece in pieces.items():
            converter.add_tensor(self.target, pattern, pattern, piece)  # type: ignore[arg-type]  # tensors will do
        (found,) = converter.convert(self.target, model=model, config=model.config).values()
        one: Tensor = found[0] if isinstance(found, list) else found
        assert one.shape[0] == 1, f"{self.target}: one expert was converted to {list(one.shape)}"
        return one[0]

    def _piece(self, entries: tuple[TensorEntry, ...], expert: int) -> Tensor:
        if len(entries) == self.experts and self.converter is not None:
            return read_tensor(entries[expert])
        (whole,) = entries
        size_bytes = prod(whole.shape[1:]) * whole.dtype.itemsize
        one = replace(
            whole, shape=(1, *whole.shape[1:]), offset=whole.offset + expert * size_bytes, size_bytes=size_bytes
        )
        return read_tensor(one)


def find_sources(
    empty: PreTrainedModel, layers: Iterable[ExpertLayer], entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, ParameterSource], frozenset[str]]:
    """By parameter, what it is made of; and all names of the checkpoint that belong to experts.

    `empty` is the model on the meta device. UnsupportedConfigError or TensorError: they cannot be read one by one.
    """
    transforms = get_model_conversion_mapping(empty)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state, prefix = empty.state_dict(), empty.base_model_prefix
    found: dict[str, dict[str | None, list[str]]] = {
        f"{layer.name}.{part.name}": {} for layer in layers for part in layer.form.slices
    }
    for name in sorted(entries, key=dot_natural_key):  # transformers' order: expert 2 before expert 10
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target in found:
            found[target].setdefault(pattern, []).append(name)
    sources = {
        target: _source(target, state[target].shape[0], named, entries, by_pattern) for target, named in found.items()
    }
    return sources, frozenset(name for named in found.values() for names in named.values() for name in names)


def _source(
    target: str, experts: int, named: Mapping[str | None, Sequence[str]], entries: Mapping[str, TensorEntry],
    by_pattern: Mapping[str, WeightConverter],
) -> ParameterSource:  # fmt: skip
    parts = {pattern or target: tuple(entries[name] for name in names) for pattern, names in named.items()}
    if not parts:
        raise TensorError(f"the checkpoint has nothing for {target}", fix="fetch all files of the model again")
    if None in named:
        if len(named) > 1 or len(parts[target]) > 1 or parts[target][0].shape[0] != experts:
            raise _unsupported(target, "as a mixture of forms")
        return ParameterSource(target, experts, parts, None)
    converter = by_pattern[next(iter(parts))]
    if set(converter.source_patterns) != set(parts) or len(converter.target_patterns) > 1:
        raise _unsupported(target, f"as {', '.join(parts)} alone")
    merged = isinstance(converter.operations[0], MergeModulelist)
    found = [len(each) if merged else each[0].shape[0] for each in parts.values()]
    alike = all(len({entry.shape for entry in each}) == 1 for each in parts.values())
    if (
        not alike
        or any(count != experts for count in found)
        or not (merged or all(len(p) == 1 for p in parts.values()))
    ):
        raise TensorError(
            f"{target} has {experts} experts, but the checkpoint has {' and '.join(map(str, found))} of them"
            f"{'' if alike else ', of different shapes'}",
            fix="config.json and the weights do not belong together, or files are missing: fetch the model again",
        )
    if not all(_per_expert(operation, first=not at) for at, operation in enumerate(converter.operations)):
        raise _unsupported(target, f"converted by {converter.operations}")
    return ParameterSource(target, experts, parts, converter)


def _per_expert(operation: ConversionOps, *, first: bool) -> bool:
    """Whether doing it to one expert gives that expert's slice of doing it to all."""
    if isinstance(operation, MergeModulelist):
        return first and operation.dim == 0
    if isinstance(operation, Concatenate | Interleave):
        return operation.dim % _AXES != 0
    if isinstance(operation, Transpose):
        return not operation.check_dims and operation.dim0 % _AXES != 0 and operation.dim1 % _AXES != 0
    return False


def _unsupported(target: str, how: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"the checkpoint holds {target} {how}, which cannot be read one expert at a time",
        fix="load the model with from_pretrained and attach it",
    )


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """What transformers' loader takes for a tensor of a file: `[...]` reads it."""

    entry: TensorEntry

    def __getitem__(self, index: object) -> Tensor:
        assert index is Ellipsis, f"transformers asks for {index!r} of a tensor"
        return read_tensor(self.entry)


@dataclass(frozen=True, slots=True)
class AbsentTensor:
    """The same for an expert: it is never read, and becomes a meta tensor of the right shape."""

    entry: TensorEntry

    def __getitem__(self, index: object) -> "AbsentTensor":
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.entry.shape, dtype=dtype or self.entry.dtype, device="meta")
