"""Writing safetensors files as a stream: the header first, then one tensor after the other, never all in memory.

The header is padded with spaces, which the format allows, so that the data starts on a page: a direct read needs that.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from steerpipe.model.safetensors import DTYPES
from steerpipe.model.tensors import Shape
from steerpipe.store.files import byte_view, checksum, write_all
from steerpipe.store.layout import PAGE_BYTES

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """What will be written under a name."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Wider numbers first, then by name: every tensor is aligned to its own width, and the order is always the same."""
    return sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))


def header(tensors: Sequence[PlannedTensor]) -> bytes:
    """The bytes before the data; their number is a multiple of 4 KiB."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        span = [end, end + tensor.size_bytes]
        described[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


def file_bytes(tensors: Sequence[PlannedTensor]) -> int:
    return len(header(tensors)) + sum(tensor.size_bytes for tensor in tensors)


class TensorFile:
    """A safetensors file being written: each planned tensor once, in any order. On the disk when the block ends."""

    def __init__(self, path: Path, tensors: Sequence[PlannedTensor]) -> None:
        top = header(tensors)
        self._places: dict[str, tuple[PlannedTensor, int]] = {}
        end = len(top)
        for tensor in tensors:
            self._places[tensor.name] = (tensor, end)
            end += tensor.size_bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(self._descriptor, top, 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, name: str, tensor: Tensor) -> str:
        """Writes one tensor and returns its checksum."""
        planned, offset = self._places.pop(name)
        found = PlannedTensor(name, tensor.dtype, tuple(tensor.shape))
        assert found == planned, f"{found} was written where {planned} was planned"
        whole = tensor.contiguous()
        content = byte_view(whole)
        write_all(self._descriptor, content, offset)
        return checksum(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._places, f"{len(self._places)} planned tensors were never written"
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
