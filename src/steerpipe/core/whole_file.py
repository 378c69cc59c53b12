"""A file that is there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steerpipe.core.errors import CapacityError


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = problem.strerror or problem
        raise CapacityError(f"{what} cannot be written to {path}: {why}", fix="name another file") from None


def check_place(path: Path, what: str) -> None:
    """Before the work: CapacityError where `path` cannot be written beside and renamed. Leaves nothing behind."""
    with _told(path, what):
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise OSError("a folder, or no plain file")
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.touch()
        partial.unlink()


def write_named(path: Path, content: bytes, what: str) -> None:
    """As `write_whole`, where a user has named `path`: CapacityError, and no folder is made."""
    check_place(path, what)
    with _told(path, what):
        write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside `path`, flushes to the disk, renames; makes the folder. OSError leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
