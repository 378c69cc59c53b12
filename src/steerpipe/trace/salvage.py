"""What a former run left in a trace folder: how much of it is whole, and where the torn tail begins.

A kill tears the last line at most. A power cut may also leave lines whose bytes in the last shard never reached the
disk. Both are tails, and are cut; damage with good prompts behind it is something else, and is refused.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steerpipe.core.errors import DamagedFileError
from steerpipe.store.files import checksum
from steerpipe.trace.index import FILE, IndexEntry, follows_on, parse_line, shard_file


@dataclass(frozen=True, slots=True)
class Salvaged:
    entries: tuple[IndexEntry, ...]
    index_bytes: int  # of their lines
    lost_bytes: int  # behind them, in the index and in the shards


def salvage(folder: Path) -> Salvaged:
    """Reads the index and the last shard; changes nothing. DamagedFileError: not only the tail is damaged."""
    content = (folder / FILE).read_bytes()
    lines = content.split(b"\n")[:-1]
    entries = list(_leading(lines))
    if any(parse_line(line) for line in lines[len(entries) + 1 :]):
        raise _damaged(folder / FILE, f"line {len(entries) + 1}")
    whole = _whole(folder, entries)
    index_bytes = sum(len(line) + 1 for line in lines[: len(whole)])
    return Salvaged(tuple(whole), index_bytes, len(content) - index_bytes + _bytes_behind(folder, whole))


def _leading(lines: list[bytes]) -> Iterator[IndexEntry]:
    last: IndexEntry | None = None
    for line in lines:
        entry = parse_line(line)
        if entry is None or not follows_on(last, entry):
            return
        last = entry
        yield entry


def _whole(folder: Path, entries: list[IndexEntry]) -> list[IndexEntry]:
    """The entries up to the first whose bytes are not there. Shards before the last were synced when they were full."""
    sizes = {shard: _size(shard_file(folder, shard)) for shard in {entry.shard for entry in entries}}
    good = [entry.end <= sizes[entry.shard] for entry in entries]
    if entries:
        last = shard_file(folder, entries[-1].shard)
        memory = last.read_bytes() if last.is_file() else b""
        for place, entry in enumerate(entries):
            if good[place] and entry.shard == entries[-1].shard:
                good[place] = checks(entry, memory)
    first_bad = good.index(False) if False in good else len(good)
    if any(good[first_bad:]):
        raise _damaged(shard_file(folder, entries[first_bad].shard), f"prompt {entries[first_bad].prompt}")
    return entries[:first_bad]


def checks(entry: IndexEntry, shard: bytes) -> bool:
    """Whether a prompt's sections have their checksums."""
    start = entry.offset
    for section in entry.sections:
        if checksum(shard[start : start + section.size_bytes]) != section.checksum:
            return False
        start += section.size_bytes
    return True


def _bytes_behind(folder: Path, entries: list[IndexEntry]) -> int:
    files = sorted(folder.glob("shard-*.trace"))
    kept: dict[Path, int] = {}
    for entry in entries:
        kept[shard_file(folder, entry.shard)] = entry.end
    return sum(_size(file) - kept.get(file, 0) for file in files)


def _size(file: Path) -> int:
    return os.stat(file).st_size if file.is_file() else 0


def _damaged(file: Path, place: str) -> DamagedFileError:
    return DamagedFileError(
        f"{file} is damaged at {place}, with whole prompts behind it",
        fix="restore the file from a copy, or trace into another folder",
    )
