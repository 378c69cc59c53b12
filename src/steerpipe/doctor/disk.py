"""The disk that holds models: free space, and how fast it reads past the page cache."""

import errno
import mmap
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from huggingface_hub import constants

from steerpipe.core.config import PREFIX, cache_folder, load_config
from steerpipe.core.units import format_bytes
from steerpipe.doctor.report import Fact, Finding, Level, Section

FILE_BYTES = 64 << 20
READ_BYTES = 4 << 20
PASSES = 3
PASSES_LIMIT_SECONDS = 1.0  # no further pass after this
LOW_SPACE_BYTES = 10 << 30
SLOW_GB_PER_SECOND = 0.5


@dataclass(frozen=True, slots=True)
class ReadRate:
    gb_per_second: float
    direct: bool
    how: str


def examine_disk(folder: Path | None = None) -> Section:
    """Writes and removes a file of 64 MiB in `folder`, or where steerpipe keeps the packs that experts come from."""
    cache = cache_folder(load_config())
    where = _existing(cache if folder is None else folder)
    free = shutil.disk_usage(where).free
    facts = [
        Fact("steerpipe cache", str(cache), how="packs: what experts are read from"),
        Fact("Hugging Face cache", constants.HF_HUB_CACHE, how="downloads: read once, when they are packed"),
        Fact("measured folder", str(where)),
        Fact("free space", free, "bytes"),
    ]
    try:
        rate = measure_read(where)
    except OSError as error:
        unwritable = Finding(
            Level.WARNING,
            f"the read rate of {where} could not be measured: {error.strerror}",
            fix="name a writable folder with 64 MiB of free space",
        )
        return Section("disk", tuple(facts), (judge_space(free), unwritable))
    facts.append(Fact("sequential read", rate.gb_per_second, "GB/s", rate.how))
    return Section("disk", tuple(facts), (judge_space(free), judge_rate(rate)))


def measure_read(folder: Path, direct_flag: int = getattr(os, "O_DIRECT", 0)) -> ReadRate:
    """Reads a new file front to back. Direct where the file system can; else buffered, with its pages dropped first."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="steerpipe-doctor-") as file:
        block = os.urandom(1 << 20)  # random: a file system that compresses gains nothing
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        size = f"{format_bytes(FILE_BYTES)} in reads of {format_bytes(READ_BYTES)}, one thread"
        if direct_flag:
            try:
                seconds, passes = _time_passes(path, direct_flag)
                return ReadRate(_rate(seconds), True, f"median of {passes} direct passes over {size}")
            except OSError as error:
                if error.errno != errno.EINVAL:  # what a file system without direct reads answers
                    raise
        seconds, passes = _time_passes(path, 0)
        return ReadRate(_rate(seconds), False, f"median of {passes} buffered passes over {size}, cached pages dropped")


def _time_passes(path: Path, flag: int) -> tuple[float, int]:
    seconds: list[float] = []
    while len(seconds) < PASSES and sum(seconds) < PASSES_LIMIT_SECONDS:
        descriptor = os.open(path, os.O_RDONLY | flag)
        try:
            if not flag and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            seconds.append(_time_pass(descriptor))
        finally:
            os.close(descriptor)
    return median(seconds), len(seconds)


def _time_pass(descriptor: int) -> float:
    with mmap.mmap(-1, READ_BYTES) as buffer:  # page-aligned, as direct reads demand
        done = 0
        begin = time.perf_counter()
        while got := os.preadv(descriptor, [buffer], done):
            done += got
        took = time.perf_counter() - begin
    assert done == FILE_BYTES, f"read {done} of {FILE_BYTES} bytes"
    return took


def _rate(seconds: float) -> float:
    return round(FILE_BYTES / seconds / 1e9, 2)


def judge_space(free_bytes: int) -> Finding:
    free = format_bytes(free_bytes)
    if free_bytes >= LOW_SPACE_BYTES:
        return Finding(Level.OK, f"{free} of disk space are free")
    return Finding(
        Level.WARNING, f"only {free} of disk space are free", fix=f"set {PREFIX}CACHE_DIR to a folder on a larger disk"
    )


def judge_rate(rate: ReadRate) -> Finding:
    figure = f"{rate.gb_per_second} GB/s"
    if not rate.direct:
        return Finding(
            Level.NOTE,
            f"this file system has no direct reads; buffered ones gave {figure}",
            fix="keep models on a local ext4 or xfs file system if experts are to be read from disk",
        )
    if rate.gb_per_second < SLOW_GB_PER_SECOND:
        return Finding(
            Level.NOTE,
            f"the disk reads {figure}: experts that are not in memory will come slowly",
            fix="keep models on a local SSD, or give enough memory for all experts",
        )
    return Finding(Level.OK, f"the disk reads {figure} past the page cache")


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
