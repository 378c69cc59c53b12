"""A Hugging Face folder given to any command is packed once, losslessly, into a cache directory."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steerpipe.core.errors import CapacityError
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store.files import canonical_json, digest, disk_errors
from steerpipe.store.manifest import SCHEMA
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions, copied_files
from steerpipe.store.progress import Progress
from steerpipe.store.reader import is_pack
from steerpipe.store.source import stamp, weight_files

_SNAPSHOT = re.compile(r"(?P<repo>models--[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")


def packed(folder: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The pack of `folder`: itself if it is one, else one in the cache, written now if it is not there yet.

    Blocks, also while another process writes the same pack. A folder of the hub's cache is known by its revision, any
    other by the name, size and time of change of its files, so a file that changed gives a new pack.
    """
    if is_pack(folder):
        return folder
    checkpoint = open_checkpoint(folder)
    out = cache_dir / "packs" / cache_name(checkpoint)
    if is_pack(out):  # it got its name when it was whole
        return out
    with disk_errors(out), _locked(out):
        if not is_pack(out):
            _write(checkpoint, out, progress)
    return out


def cache_name(checkpoint: Checkpoint) -> str:
    """A readable name with the key in it."""
    folder = checkpoint.folder.absolute()
    snapshot = _SNAPSHOT.search(folder.as_posix())
    if snapshot:
        return f"{snapshot['repo'].removeprefix('models--')}-{snapshot['revision'][:16]}-v{SCHEMA}"
    files = {*weight_files(checkpoint), *copied_files(folder)}
    key = digest(canonical_json([str(folder.resolve()), stamp(files)]))
    return f"{folder.name}-{key[:16]}-v{SCHEMA}"


def _write(checkpoint: Checkpoint, out: Path, progress: Progress | None) -> None:
    try:
        write_pack(checkpoint, out, PackOptions(), progress)
    except CapacityError as problem:
        raise CapacityError(
            problem.what,
            fix=f"free room there, choose another cache directory, or pack into a smaller format on another disk "
            f"with `steerpipe pack {checkpoint.folder} OUT --experts int4` and give OUT instead",
        ) from problem


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process at a time; the lock ends with its process, however that ends."""
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out.with_name(out.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
