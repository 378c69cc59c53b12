"""Writes a trace folder so that a kill at any moment costs the prompt in flight and nothing else.

A prompt's sections go to the end of the shard, then its line to the end of the index: the line is what counts. When a
folder is opened again, everything behind the last whole line is cut off. Shards are synced to the disk when they are
full and at the end, so after a power cut only the last one can lack bytes: it is checked whole when it is opened.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.predict.records import TracedSequence
from steerpipe.store.files import checksum, disk_errors, sync_folder, write_all, write_file
from steerpipe.trace import header as header_file
from steerpipe.trace import index as index_file
from steerpipe.trace.header import TraceHeader
from steerpipe.trace.index import IndexEntry, Section, shard_file
from steerpipe.trace.record import encode, tokens_digest
from steerpipe.trace.salvage import salvage

SHARD_BYTES = 64 << 20  # what is checked at most when a trace is opened again: .1 s


class TraceWriter:
    """Open and locked until `close`. What a former run left is kept, but for its torn tail.

    InputError: another process writes there, or the folder holds something else than a trace of the same model with
    the same options. DamagedFileError: more than a tail is torn.
    """

    def __init__(self, folder: Path, header: TraceHeader, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self.header = header
        self._shard_bytes = shard_bytes
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._index = _open_locked(folder)
            try:
                _settle_header(folder, header)
                left = salvage(folder)
                self.lost_bytes = left.lost_bytes
                self._entries = list(left.entries)
                self._index_bytes = left.index_bytes
                self._shard = self._open_shard(self._last.shard if self._last else 0)
                self._cut_tail()
            except BaseException:
                os.close(self._index)
                raise
        self._open = True

    @property
    def finished(self) -> frozenset[str]:
        """Prompts that need not be traced again."""
        return frozenset(entry.prompt for entry in self._entries)

    @property
    def tokens(self) -> int:
        return self._last.next_row if self._last else 0

    def write(self, sequences: Sequence[TracedSequence], source: str) -> None:
        """One prompt, in as many windows as it was traced in; it is in the trace when this returns. May wait."""
        with disk_errors(self.folder):
            if self._last and self._last.shard == self._shard_number and self._last.end >= self._shard_bytes:
                self._turn_over()
            entry = self._append(sequences, source)
            self._index_bytes = write_all(self._index, entry.to_line(), self._index_bytes)
        self._entries.append(entry)

    def close(self) -> None:
        """Everything is on the disk, and the lock is given back. Twice is once."""
        if not self._open:
            return
        self._open = False
        with disk_errors(self.folder):
            os.fsync(self._shard)
            os.fsync(self._index)
        os.close(self._shard)
        os.close(self._index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _last(self) -> IndexEntry | None:
        return self._entries[-1] if self._entries else None

    def _open_shard(self, number: int) -> int:
        self._shard_number = number
        return os.open(shard_file(self.folder, number), os.O_RDWR | os.O_CREAT, 0o644)

    def _cut_tail(self) -> None:
        os.ftruncate(self._index, self._index_bytes)
        os.ftruncate(self._shard, self._last.end if self._last else 0)
        following = shard_file(self.folder, self._shard_number + 1)
        following.unlink(missing_ok=True)  # begun, but no line of the index got so far

    def _turn_over(self) -> None:
        """The next shard; the full one is on the disk before any line names a later one."""
        os.fsync(self._shard)
        os.fsync(self._index)
        os.close(self._shard)
        self._shard = self._open_shard(self._shard_number + 1)

    def _append(self, sequences: Sequence[TracedSequence], source: str) -> IndexEntry:
        prompt = sequences[0].prompt
        assert all(each.prompt == prompt for each in sequences), "windows of one prompt are written together"
        sections = encode(sequences, self.header)
        offset = self._last.end if self._last and self._last.shard == self._shard_number else 0
        write_all(self._shard, b"".join(sections.values()), offset)
        lengths = tuple(len(each.tokens) for each in sequences)
        return IndexEntry(
            prompt=prompt,
            sha256=tokens_digest([each.tokens for each in sequences]),
            source=source,
            tokens=sum(lengths),
            prompt_tokens=sum(each.prompt_tokens for each in sequences),
            lengths=lengths,
            shard=self._shard_number,
            row=self.tokens,
            offset=offset,
            sections=tuple(Section(name, len(part), checksum(part)) for name, part in sections.items()),
        )


def _open_locked(folder: Path) -> int:
    """The index, locked for this process until it is closed."""
    strangers = sorted(each.name for each in folder.iterdir() if not _is_ours(each.name))
    if strangers and not (folder / header_file.FILE).exists():
        raise InputError(
            f"{folder} is not a trace: it holds {', '.join(strangers[:3])}", fix="choose a new or empty folder"
        )
    descriptor = os.open(folder / index_file.FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            f"another process is writing into {folder}", fix="wait until it has ended, or choose another folder"
        ) from None
    return descriptor


def _is_ours(name: str) -> bool:
    return name in (header_file.FILE, f"{header_file.FILE}.partial", index_file.FILE) or name.endswith(".trace")


def _settle_header(folder: Path, header: TraceHeader) -> None:
    """Writes the header, whole or not at all, or compares it with the one that is there."""
    file = folder / header_file.FILE
    if not file.exists():
        if os.stat(folder / index_file.FILE).st_size:
            raise DamagedFileError(
                f"{folder} has an index, but no {file.name}", fix="restore it, or use another folder"
            )
        partial = folder / f"{file.name}.partial"
        write_file(partial, header.to_json())
        os.rename(partial, file)
        sync_folder(folder)
        return
    differences = TraceHeader.from_json(file.read_bytes(), str(file)).differences(header)
    if differences:
        raise InputError(
            f"the trace in {folder} was made with {'; '.join(differences)}",
            fix="use the same model and options to go on with it, or choose another folder",
        )
