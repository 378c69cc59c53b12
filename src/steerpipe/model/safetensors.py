"""Reading safetensors files: the header is checked against the file before a byte is believed; no pickle, no mmap.

A file is 8 bytes of header length, a JSON header, then the data. A tensor is read by one positioned read
into memory of its own (64-byte aligned, as torch allocates it), so loading dense weights never touches experts.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from steerpipe.core.errors import CheckpointError, DamagedFileError, TensorError, TransferError
from steerpipe.model.keys import counts
from steerpipe.model.tensors import Shape

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    offset: int  # from the start of the file
    size_bytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file. Raises DamagedFileError unless the tensors fill the file exactly."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8:
                raise _damaged(file, f"it has {size} bytes, not even the 8 of a header's length")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(file, f"its header should have {length} bytes, but the whole file has {size}")
            header = json.loads(stream.read(length))
    except OSError as problem:
        raise CheckpointError(
            f"{file} cannot be read: {problem.strerror}", fix="check that it is a file and its permissions"
        ) from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or nested too deep
        raise _damaged(file, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, said, 8 + length) for name, said in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size_bytes)):
        if entry.offset != end:
            raise _damaged(file, f"its tensors overlap or leave a hole at byte {end}")
        end += entry.size_bytes
    if end != size:
        raise _damaged(file, f"its tensors need {end} bytes, but the file has {size}")
    return entries


def read_tensor(entry: TensorEntry) -> Tensor:
    """One positioned read. The tensor owns its memory."""
    storage = torch.empty(entry.size_bytes, dtype=torch.uint8)
    if entry.size_bytes:
        view = memoryview(cast("Any", storage.numpy())).cast("B")
        try:
            _read_into(view, entry)
        except OSError as problem:
            raise TransferError(
                f"reading {entry.file} failed: {problem}", fix="check the disk, then try again"
            ) from None
    return storage.view(entry.dtype).reshape(entry.shape)


def _read_into(view: memoryview, entry: TensorEntry) -> None:
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        done = 0
        while done < entry.size_bytes:
            got = os.preadv(descriptor, [view[done:]], entry.offset + done)
            if got == 0:
                raise _damaged(entry.file, "it became shorter while it was read")
            done += got
    finally:
        os.close(descriptor)


def _entry(file: Path, name: str, said: Any, data_start: int) -> TensorEntry:
    try:
        shape = counts(said["shape"])
        begin, end = said["data_offsets"]
        stored = said["dtype"]
        if not (type(begin) is type(end) is int and type(stored) is str):  # True is an int, but not an offset
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise _damaged(file, f"its entry for {name!r} is not that of a tensor") from None
    if stored not in DTYPES:
        raise TensorError(
            f"{file.name}: {name} is stored as {stored}",
            fix=f"only {', '.join(DTYPES)} can be read: convert the checkpoint to bfloat16",
        )
    dtype = DTYPES[stored]
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"{name!r} of shape {list(shape)} cannot lie in bytes {begin} to {end}")
    return TensorEntry(file, dtype, shape, data_start + begin, end - begin)


def _damaged(file: Path, why: str) -> DamagedFileError:
    return DamagedFileError(f"{file} is damaged: {why}", fix="download or copy the file again")
