"""The file of blocks behind a transformers model, and the face of it that the memory ladder knows.

`transfer` was written for a `store.Pack`; what it uses of one is here, over blocks of any form. A slot of its arena is
two matrices of a size that the layout names, one behind the other: `whole_slot` takes them for one stretch of bytes.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from steerpipe.core.errors import PackError, TransferError
from steerpipe.core.protocols import ExpertWeights
from steerpipe.integrations.form import ExpertForm
from steerpipe.store.files import byte_view, checksum, write_all

_SLOT_ROW = 64  # bytes: one cache line, so that the arena puts nothing between the two matrices
_ATTACH_AGAIN = "the file was changed by another program or the disk is bad: load the model again"


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A block as the arena sees it: bytes [2 · width, hidden] and [hidden, width]."""

    hidden: int
    width: int
    block_bytes: int

    @classmethod
    def of(cls, form: ExpertForm) -> "SlotLayout":
        return cls(_SLOT_ROW, -(-form.block_bytes // (3 * _SLOT_ROW)), form.block_bytes)

    @property
    def slot_bytes(self) -> int:
        return 3 * self.hidden * self.width


def whole_slot(weights: ExpertWeights) -> Tensor:
    """A slot as one stretch of bytes: uint8 [slot_bytes], shared."""
    first, second = weights.gate_up, weights.down
    assert first.data_ptr() + first.numel() == second.data_ptr(), "the two parts of a slot do not lie side by side"
    return first.as_strided((first.numel() + second.numel(),), (1,))


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where one expert lies in the file, and what its CRC-32 is."""

    offset: int
    checksum: str
    layout: SlotLayout


@dataclass(frozen=True, slots=True)
class _Experts:
    experts: int


@dataclass(frozen=True, slots=True)
class _Spec:
    forms: Sequence[ExpertForm]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(len(self.forms)))

    def moe(self, layer: int) -> _Experts:
        return _Experts(self.forms[layer].experts)


@dataclass(frozen=True, slots=True)
class _SizeClass:
    layout: SlotLayout


@dataclass(frozen=True, slots=True)
class _Manifest:
    classes: tuple[_SizeClass, ...]


class BlockFile:
    """Blocks on disk, layer after layer, expert after expert. Many threads may read at once.

    Layers are numbered as their modules are found. The file stays open until this is collected, so it may be removed.
    """

    verify = True

    def __init__(self, file: Path, forms: Sequence[ExpertForm], checksums: Sequence[Sequence[str]]) -> None:
        self.expert_file = file
        self.forms = tuple(forms)
        self.spec = _Spec(self.forms)
        self._layouts = [SlotLayout.of(form) for form in forms]
        self.manifest = _Manifest(tuple(_SizeClass(each) for each in dict.fromkeys(self._layouts)))
        self._places = [
            [BlockPlace(offset, found, layout) for offset, found in zip(offsets, sums, strict=True)]
            for offsets, sums, layout in zip(block_offsets(forms), checksums, self._layouts, strict=True)
        ]
        self._descriptor = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def experts(self) -> int:
        return sum(form.experts for form in self.forms)

    @property
    def size_bytes(self) -> int:
        return file_bytes(self.forms)

    def place(self, layer: int, expert: int) -> BlockPlace:
        return self._places[layer][expert]

    def layout(self, layer: int) -> SlotLayout:
        return self._layouts[layer]

    def read_block(self, layer: int, expert: int, block: Tensor) -> None:
        """Fills `block` (uint8 [block_bytes]). TransferError or PackError: the disk does not give what was written."""
        view, done, place = byte_view(block), 0, self._places[layer][expert]
        try:
            while done < len(view):
                got = os.preadv(self._descriptor, [view[done:]], place.offset + done)
                if not got:
                    raise TransferError(f"{self.expert_file} became shorter while it was in use", fix=_ATTACH_AGAIN)
                done += got
        except OSError as problem:
            raise TransferError(
                f"reading {self.expert_file} failed: {problem}", fix="check the disk, then try again"
            ) from None
        self.check_block(layer, expert, view)

    def check_block(self, layer: int, expert: int, block: memoryview) -> None:
        """Raises PackError unless the block is the one that was written."""
        found, said = checksum(block), self._places[layer][expert].checksum
        if found != said:
            raise PackError(
                f"expert {expert} of layer {layer} in {self.expert_file} has checksum {found} instead of {said}",
                fix=_ATTACH_AGAIN,
            )

    def decode_block(self, layer: int, block: Tensor, dtype: torch.dtype, out: ExpertWeights) -> ExpertWeights:
        """A block is compute-ready as it is: one copy into the slot."""
        assert dtype == torch.uint8, f"blocks are bytes, not {dtype}"
        whole_slot(out)[: self._layouts[layer].block_bytes].copy_(block)
        return out


class BlockWriter:
    """A file of blocks being written: each block once, in any order. The file exists, and stays."""

    def __init__(self, file: Path, forms: Sequence[ExpertForm]) -> None:
        self._file = file
        self._forms = tuple(forms)
        self._offsets = block_offsets(forms)
        self._checksums = [[""] * form.experts for form in forms]
        self._descriptor = os.open(file, os.O_WRONLY)

    def write(self, layer: int, expert: int, block: Tensor) -> None:
        content = byte_view(block)
        assert len(content) == self._forms[layer].block_bytes, f"a block of {len(content)} bytes"
        assert not self._checksums[layer][expert], f"expert {expert} of layer {layer} was written already"
        write_all(self._descriptor, content, self._offsets[layer][expert])
        self._checksums[layer][expert] = checksum(content)

    def finish(self) -> BlockFile:
        """Opens what was written. It need not outlive the process, so it is not forced to the disk."""
        missing = sum(not found for sums in self._checksums for found in sums)
        assert not missing, f"{missing} blocks were never written"
        return BlockFile(self._file, self._forms, self._checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def block_offsets(forms: Sequence[ExpertForm]) -> list[list[int]]:
    """Of each layer's experts, in the file."""
    return list(_offsets(forms))


def file_bytes(forms: Sequence[ExpertForm]) -> int:
    return sum(form.experts * form.block_bytes for form in forms)


def _offsets(forms: Sequence[ExpertForm]) -> Iterator[list[int]]:
    start = 0
    for form in forms:
        yield [start + expert * form.block_bytes for expert in range(form.experts)]
        start += form.experts * form.block_bytes
