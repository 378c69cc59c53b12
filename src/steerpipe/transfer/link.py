"""What experts travel over. A link fills buffers with bytes of blocks; everything above it is the same for all.

Link (protocol)
├── DiskLink      the pack's file (disk)
├── RamTier       raw blocks in RAM over another link (ram)
├── PacedLink     another link, slowed down on the real clock
└── FaultyLink    another link with faults, for tests (faulty)
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from steerpipe.core.ids import ExpertId
from steerpipe.core.units import format_bytes

Clock = Callable[[], float]

_HALF_LIFE_BYTES = 64 << 20  # of the measured rate


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """One expert's block in the pack's file."""

    expert: ExpertId
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block that is wanted in `into`, which starts on a page and is as long as the part."""

    address: BlockAddress
    start: int  # within the block
    into: memoryview

    @property
    def offset(self) -> int:
        """In the file."""
        return self.address.offset + self.start

    @property
    def end(self) -> int:
        return self.offset + len(self.into)


class Link(Protocol):
    """A way to the blocks. Reader threads call it, several at once; it may keep what passes through."""

    @property
    def name(self) -> str:
        """For people: what it is, and whether anything slows it down."""
        ...

    @property
    def disk(self) -> "LinkMeter":
        """Of the reads that reached the disk."""
        ...

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fills every buffer; blocks. Neighbours on disk that stand side by side in `pieces` are one read.

        OSError if it may go well another time (buffers then hold anything), TransferError if it never will.
        """
        ...

    def keep(self, address: BlockAddress, block: memoryview) -> None:
        """The block arrived whole and its checksum agreed: a tier may copy it."""
        ...

    def forget(self, address: BlockAddress) -> None:
        """What was read for this block is wrong: the next read must come from further below."""
        ...

    def close(self) -> None:
        """Gives memory and descriptors back. No read is under way, none may follow. Twice is once."""
        ...


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What went over a link so far."""

    reads: int = 0
    read_bytes: int = 0
    busy_seconds: float = 0.0  # with at least one read outstanding
    bytes_per_second: float = 0.0  # lately; 0 before the first read


class LinkMeter:
    """Measures a link. Many threads; overlapping reads count their time once."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._outstanding = 0
        self._marked = 0.0  # when busy_seconds was last brought up to date
        self._reads = 0
        self._bytes = 0
        self._busy = 0.0
        self._rate = 0.0
        self._sampled = (0, 0.0)  # bytes and busy seconds when the rate was last measured

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Around one read. A read that raises counts its time, not its bytes."""
        self._step(+1)
        try:
            yield
        except BaseException:
            self._step(-1)
            raise
        self._step(-1, size_bytes)

    def snapshot(self) -> LinkRate:
        with self._lock:
            return LinkRate(self._reads, self._bytes, self._busy, self._rate)

    def _step(self, change: int, arrived_bytes: int = 0) -> None:
        with self._lock:
            now = self._clock()
            if self._outstanding:
                self._busy += now - self._marked
            self._marked = now
            self._outstanding += change
            if arrived_bytes:
                self._reads += 1
                self._bytes += arrived_bytes
                self._measure()

    def _measure(self) -> None:
        size, seconds = self._bytes - self._sampled[0], self._busy - self._sampled[1]
        if seconds > 0:
            fresh = 1.0 if not self._rate else 1 - 0.5 ** (size / _HALF_LIFE_BYTES)
            self._rate += fresh * (size / seconds - self._rate)
            self._sampled = (self._bytes, self._busy)


class OverLink:
    """A link over another that changes nothing: what wrappers have in common."""

    def __init__(self, below: Link) -> None:
        self.below = below

    @property
    def name(self) -> str:
        return self.below.name

    @property
    def disk(self) -> LinkMeter:
        return self.below.disk

    def read(self, pieces: Sequence[Piece]) -> None:
        self.below.read(pieces)

    def keep(self, address: BlockAddress, block: memoryview) -> None:
        self.below.keep(address, block)

    def forget(self, address: BlockAddress) -> None:
        self.below.forget(address)

    def close(self) -> None:
        self.below.close()


class PacedLink(OverLink):
    """Slows a link to a rate on the real clock, to show on a small machine what a large model feels like.

    Reads queue up for the line as on a wire. A sleep that took too long is made up for by the next ones, so the rate
    holds on average: waking up late by 60 us would be a third of a 16 KiB block at 100 MB/s.
    """

    def __init__(
        self, below: Link, bytes_per_second: float, clock: Clock = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        assert bytes_per_second > 0, "a pace is positive"
        super().__init__(below)
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the line has done all that was asked for
        self._overslept = 0.0  # seconds, still to be made up for

    @property
    def name(self) -> str:
        return f"{self.below.name}, paced to {format_bytes(round(self.bytes_per_second))}/s"

    def read(self, pieces: Sequence[Piece]) -> None:
        due = self._reserve(sum(len(piece.into) for piece in pieces))
        self.below.read(pieces)
        wait = due - self._clock()
        if wait > 0:
            self._sleep(wait)
            with self._lock:
                self._overslept += max(0.0, self._clock() - due)

    def _reserve(self, size_bytes: int) -> float:
        """When a read of so many bytes that is asked for now is done."""
        with self._lock:
            need = size_bytes / self.bytes_per_second
            made_up = min(self._overslept, need)
            self._overslept -= made_up
            self._free_at = max(self._clock(), self._free_at) + need - made_up
            return self._free_at
