"""Reads a trace folder, also while it is being written: prompts whose line is in the index."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.predict.records import Geometry, TracedSequence
from steerpipe.store.files import checksum
from steerpipe.trace import header as header_file
from steerpipe.trace import index as index_file
from steerpipe.trace.header import TraceHeader
from steerpipe.trace.index import IndexEntry, read_index, shard_file
from steerpipe.trace.record import STATES, decode, needed_sections
from steerpipe.transfer.recorded import Recording

_FIX = "name a folder that `steerpipe trace` wrote"


class TraceReader:
    """The prompts of a trace, in the order in which they were finished; iterating reads one at a time.

    `states=False` leaves the hidden states on the disk. DamagedFileError: files that are not what they say.
    """

    def __init__(self, folder: Path | str, *, states: bool = True) -> None:
        self.folder = Path(folder)
        self.header: TraceHeader = _read_header(self.folder)
        self._states = states
        index = self.folder / index_file.FILE
        if not index.is_file():
            raise InputError(f"{self.folder} has no {index.name}", fix=_FIX)
        self.entries: Sequence[IndexEntry] = read_index(index.read_bytes(), str(index))
        if not self.entries:
            raise InputError(f"{index} has no finished prompt yet", fix="run the same `steerpipe trace` again")
        self._check_sizes()

    @property
    def geometry(self) -> Geometry:
        return self.header.geometry

    @property
    def vocabulary(self) -> int:
        return self.header.vocabulary

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(entry.prompt for entry in self.entries)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    def __len__(self) -> int:
        """Sequences, which are more than prompts where long ones were cut into windows."""
        return sum(len(entry.lengths) for entry in self.entries)

    def __iter__(self) -> Iterator[TracedSequence]:
        opened: tuple[int, BinaryIO] | None = None
        try:
            for entry in self.entries:
                if opened is None or opened[0] != entry.shard:
                    if opened is not None:
                        opened[1].close()
                    opened = entry.shard, open(shard_file(self.folder, entry.shard), "rb")  # noqa: SIM115  below
                yield from self._read(entry, opened[1])
        finally:
            if opened is not None:
                opened[1].close()

    def select(self, prompts: Collection[str]) -> "TraceReader":
        """The same trace with these prompts alone. InputError: one that it does not have."""
        wanted = frozenset(prompts)
        missing = sorted(wanted - frozenset(self.prompts))
        if missing:
            raise InputError(
                f"{self.folder} has no prompt {missing[0]!r} ({len(missing)} of {len(wanted)} are missing)",
                fix="take prompt ids from its index.jsonl",
            )
        part = TraceReader(self.folder, states=self._states)
        part.entries = [entry for entry in self.entries if entry.prompt in wanted]
        return part

    def recording(self, prompts: Iterable[str] | None = None, *, tokens: int | None = None) -> Recording:
        """The routing of some prompts (None: of all), one after the other, for `transfer.replay`.

        `tokens`: only so many; the prompts behind them are not read.
        """
        chosen = self if prompts is None else self.select(frozenset(prompts))
        lean = TraceReader(self.folder, states=False)
        rows = np.cumsum([0, *(entry.tokens for entry in chosen.entries)])
        lean.entries = [
            entry for entry, row in zip(chosen.entries, rows, strict=False) if tokens is None or row < tokens
        ]
        sequences = list(lean)
        if not sequences:
            raise InputError(f"{self.folder} has no prompt to replay", fix="trace some prompts first")
        numbers = np.repeat(np.arange(len(sequences), dtype=np.int32), [len(each.tokens) for each in sequences])
        routing = np.concatenate([each.experts for each in sequences]).astype(np.int64)
        return Recording(str(self.folder), routing[:tokens], numbers[:tokens], self.geometry.experts)

    def _check_sizes(self) -> None:
        ends: dict[int, int] = {}
        for entry in self.entries:
            ends[entry.shard] = entry.end
        for shard, end in ends.items():
            file = shard_file(self.folder, shard)
            if not file.is_file() or file.stat().st_size < end:
                raise DamagedFileError(
                    f"{file} has not the {end:,} bytes that the index counts on", fix="restore it from a copy"
                )

    def _read(self, entry: IndexEntry, shard: BinaryIO) -> list[TracedSequence]:
        if not needed_sections(self.header) <= {section.name for section in entry.sections}:
            raise DamagedFileError(f"prompt {entry.prompt} has not all sections", fix="restore index.jsonl from a copy")
        sections, place = {}, entry.offset
        for section in entry.sections:
            if self._states or section.name not in STATES:
                shard.seek(place)
                content = shard.read(section.size_bytes)
                if checksum(content) != section.checksum:
                    raise DamagedFileError(
                        f"{shard_file(self.folder, entry.shard)} is damaged in the {section.name} of prompt "
                        f"{entry.prompt}", fix="restore it from a copy, or leave that prompt out",
                    )  # fmt: skip
                sections[section.name] = content
            place += section.size_bytes
        return decode(sections, self.header, entry.prompt, entry.lengths, entry.prompt_tokens)


def _read_header(folder: Path) -> TraceHeader:
    file = folder / header_file.FILE
    if not file.is_file():
        raise InputError(f"{folder} is not a trace: it has no {file.name}", fix=_FIX)
    return TraceHeader.from_json(file.read_bytes(), str(file))
