"""`index.jsonl`: one line per finished prompt. A prompt is in the trace when its line is, newline included."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from steerpipe.core.errors import DamagedFileError
from steerpipe.trace.fields import checked

FILE = "index.jsonl"
_LEAST = {"size_bytes": 0, "tokens": 1, "prompt_tokens": 0, "shard": 0, "row": 0, "offset": 0}


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of one kind, at the end of the section before it."""

    name: str
    size_bytes: int
    checksum: str  # CRC-32


@dataclass(frozen=True, slots=True)
class IndexEntry:
    prompt: str
    sha256: str  # of the token ids
    source: str  # where the prompt came from
    tokens: int
    prompt_tokens: int  # the first of them; the rest was generated
    lengths: tuple[int, ...]  # of the windows that were traced by themselves, `tokens` in all
    shard: int
    row: int  # tokens of the trace before it
    offset: int  # in the shard
    sections: tuple[Section, ...]

    @property
    def end(self) -> int:
        return self.offset + sum(section.size_bytes for section in self.sections)

    @property
    def next_row(self) -> int:
        return self.row + self.tokens

    def to_line(self) -> bytes:
        plain = asdict(self) | {"sections": [list(asdict(section).values()) for section in self.sections]}
        return json.dumps(plain, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "IndexEntry":
        """Raises ValueError, TypeError or KeyError for anything but a whole line."""
        raw: Mapping[str, object] = json.loads(line)
        sections = raw["sections"]
        lengths = raw["lengths"]
        if not isinstance(sections, list) or not isinstance(lengths, list):
            raise TypeError("no sections or no lengths")
        listed = tuple(
            checked(Section, {"name": name, "size_bytes": size, "checksum": check}, _LEAST)
            for name, size, check in sections
        )
        entry = checked(cls, dict(raw) | {"sections": listed, "lengths": tuple(lengths)}, _LEAST)
        if not all(type(each) is int and each > 0 for each in lengths):
            raise ValueError(f"windows of {lengths} tokens")
        if sum(entry.lengths) != entry.tokens or entry.prompt_tokens > entry.tokens:
            raise ValueError("numbers that do not agree")
        return entry


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.trace"


def read_index(content: bytes, where: str) -> list[IndexEntry]:
    """What follows the last newline was torn by a kill, or is being written: it is left out.

    DamagedFileError: a line that is whole but not an entry, or entries that do not follow each other.
    """
    entries: list[IndexEntry] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        entry = parse_line(line)
        if entry is None or not follows_on(entries[-1] if entries else None, entry):
            raise DamagedFileError(
                f"line {number} of {where} is damaged",
                fix="run the same `steerpipe trace` again, which cuts a torn tail, or trace into another folder",
            )
        entries.append(entry)
    return entries


def parse_line(line: bytes) -> IndexEntry | None:
    """None: not a whole entry."""
    try:
        return IndexEntry.from_line(line)
    except (ValueError, TypeError, KeyError):
        return None


def follows_on(last: IndexEntry | None, entry: IndexEntry) -> bool:
    """Whether `entry` begins where the one before it ends, in its shard or at the start of the next."""
    if last is None:
        return (entry.shard, entry.row, entry.offset) == (0, 0, 0)
    place = (entry.shard, entry.offset)
    return entry.row == last.next_row and place in ((last.shard, last.end), (last.shard + 1, 0))
