"""What has been packed so far, kept beside the unfinished files so that a killed run can go on.

The first line says which job it is; each further line is one block that was written, in the order on disk. A line may
be torn by the kill, and after a power cut it may stand for a block that never reached the disk: so a record is
believed only after its block was read back and its checksum agreed. The open file also holds the lock on the job.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from steerpipe.core.errors import PackError
from steerpipe.store.files import write_all
from steerpipe.store.loss import SquareSums


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block that was written: its CRC-32, and the loss of gate, up and down."""

    checksum: str
    gate: SquareSums
    up: SquareSums
    down: SquareSums

    def to_line(self) -> bytes:
        sums = [number for kind in (self.gate, self.up, self.down) for number in (kind.error, kind.weight)]
        return json.dumps([self.checksum, *sums]).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "BlockRecord":
        """Raises ValueError for anything but a whole line."""
        checksum, *sums = json.loads(line)
        if len(sums) != 6:
            raise ValueError(f"{len(sums)} sums in a journal line")
        return cls(str(checksum), SquareSums(*sums[0:2]), SquareSums(*sums[2:4]), SquareSums(*sums[4:6]))


class Journal:
    """The journal of one job, open and locked until `close`. A journal of another job is emptied."""

    def __init__(self, file: Path, job: str) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(file)
            self.records = self._read(job)
            self.keep(job, len(self.records))
        except BaseException:
            os.close(self._descriptor)
            raise

    def keep(self, job: str, count: int) -> None:
        """Forgets all records after the first `count`."""
        self.records = self.records[:count]
        content = job.encode() + b"\n" + b"".join(record.to_line() for record in self.records)
        self._end = write_all(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, self._end)

    def append(self, record: BlockRecord) -> None:
        """After the block was written."""
        self.records.append(record)
        self._end = write_all(self._descriptor, record.to_line(), self._end)

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._descriptor)

    def _lock(self, file: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(self._descriptor).st_ino == os.stat(file).st_ino  # it may have been renamed away meanwhile
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise PackError(
                f"another process is writing into {file.parent}",
                fix="wait until it has ended, then run the command again",
            )

    def _read(self, job: str) -> list[BlockRecord]:
        size = os.fstat(self._descriptor).st_size
        lines = os.pread(self._descriptor, size, 0).split(b"\n")[:-1]  # what follows the last newline is torn
        if not lines or lines[0] != job.encode():
            return []
        records: list[BlockRecord] = []
        for line in lines[1:]:
            try:
                records.append(BlockRecord.from_line(line))
            except (ValueError, TypeError):
                break
        return records
