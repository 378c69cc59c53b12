"""Writing to disk so that nothing half-written passes for good: room first, full writes, fsync, rename."""

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError, PackError
from steerpipe.core.units import format_bytes

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checksum(content: memoryview | bytes, before: str = "00000000") -> str:
    """CRC-32, 8 hex digits, of what had `before` and then `content`: 4 GB/s on one core, so that checking keeps up with
    a disk (BLAKE2b: .9 GB/s)."""
    return f"{zlib.crc32(content, int(before, 16)):08x}"


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    if not tensor.numel():
        return memoryview(b"")
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()  # an array is a buffer, which its stub does not say
    return memoryview(flat)


def digest(content: bytes) -> str:
    """BLAKE2b of 16 bytes: an identity, for small things."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def compact_json(content: bytes) -> bytes:
    """The same JSON without its spaces; `content` itself where that cannot be had exactly."""
    try:
        value = json.loads(content)
        compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError:  # not JSON, or text that UTF-8 cannot hold
        return content
    return compact if json.loads(compact) == value else content


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def check_room(path: Path, needed_bytes: int) -> None:
    """Raises CapacityError unless the disk under `path` has room for so many bytes more."""
    free_bytes = shutil.disk_usage(existing_parent(path)).free
    if needed_bytes > free_bytes:
        raise CapacityError(
            f"{path} needs {needed_bytes:,} bytes ({format_bytes(needed_bytes)}), "
            f"but its disk has {free_bytes:,} free ({format_bytes(free_bytes)})",
            fix=f"free {format_bytes(needed_bytes - free_bytes)} there, or choose another disk or a smaller format",
        )


@contextmanager
def disk_errors(path: Path, *, resumes: bool = True) -> Iterator[None]:
    """Turns what the operating system says while writing `path` into an error of ours.

    `resumes`: whether the same command goes on with what is there already.
    """
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        if problem.errno in _NO_ROOM:
            raise CapacityError(
                f"writing {path} stopped: {reason}",
                fix="make room on that disk and run the same command again: "
                + ("it continues where it stopped" if resumes else "it begins anew"),
            ) from problem
        raise PackError(f"writing {path} failed: {problem}", fix="check the path and its permissions") from problem


def write_all(descriptor: int, content: memoryview | bytes, offset: int) -> int:
    """Writes all of `content` at `offset` and returns where it ends; short writes are continued."""
    view = memoryview(content)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
    return offset + done


def write_file(path: Path, content: bytes) -> None:
    """The whole file, on the disk when this returns. Not atomic: for files of a folder that is renamed later."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name. After this it is there as a whole, also after a power cut."""
    sync_folder(partial)
    os.rename(partial, final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
