"""Dense weights of an opened pack. In another dtype than stored they are cast piece by piece: none is held twice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steerpipe.core.errors import PackError
from steerpipe.model.safetensors import TensorEntry, read_tensor
from steerpipe.store.dense import SCALE, restore
from steerpipe.store.files import byte_view, checksum
from steerpipe.store.manifest import PACK_AGAIN

PIECE_BYTES = 1 << 20  # of what is stored, beside the weight that is made of it


@dataclass(frozen=True, slots=True)
class DenseFile:
    """What lies in dense.safetensors, by its names there: weights, codes and scales."""

    entries: Mapping[str, TensorEntry]
    checksums: Mapping[str, str] | None  # None: they are not compared

    def read(self, name: str) -> Tensor:
        """As it lies on disk."""
        tensor = read_tensor(self.entries[name])
        self._compare(name, checksum(byte_view(tensor)))
        return tensor

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight of that name, rounded once. Beside it no more than a piece is in memory."""
        entry = self.entries[name]
        if entry.dtype == dtype:
            return self.read(name)
        scales = self.read(name + SCALE) if name + SCALE in self.entries else None
        weight = torch.empty(entry.shape, dtype=dtype)
        found = checksum(b"")
        for begin, piece in _pieces(entry):
            part = {name: read_tensor(piece)}
            found = checksum(byte_view(part[name]), found)
            end = begin + piece.shape[0]
            if scales is not None:
                part[name + SCALE] = scales[begin:end]
            weight[begin:end] = restore(part, name)
        self._compare(name, found)
        return weight

    def _compare(self, name: str, found: str) -> None:
        if self.checksums is not None and found != (said := self.checksums[name]):
            raise PackError(
                f"{name} in {self.entries[name].file} has checksum {found} instead of {said}", fix=PACK_AGAIN
            )


@dataclass(frozen=True, slots=True)
class DenseWeights(Mapping[str, Tensor]):
    """By the checkpoint's names; each is read when it is asked for."""

    file: DenseFile
    dtypes: Mapping[str, torch.dtype]  # of every weight

    def __getitem__(self, name: str) -> Tensor:
        return self.file.read_as(name, self.dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def _pieces(entry: TensorEntry) -> Iterator[tuple[int, TensorEntry]]:
    """(its first row, so many whole rows as a piece takes), one after the other."""
    rows = entry.shape[0]
    row_bytes = entry.size_bytes // rows
    at_once = max(1, PIECE_BYTES // row_bytes)
    for begin in range(0, rows, at_once):
        count = min(at_once, rows - begin)
        shape, size_bytes = (count, *entry.shape[1:]), count * row_bytes
        yield begin, replace(entry, shape=shape, offset=entry.offset + begin * row_bytes, size_bytes=size_bytes)
