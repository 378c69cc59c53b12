"""What moves blocks into slots and entries into the table: one copy stream beside the stream that computes.

Copier (protocol)
├── HostCopier      memory of the CPU, everything at once: for tests and Triton's interpreter
├── CudaCopier      a stream of the GPU (stream)
└── PacedCopier     another copier, slowed down on the real clock

Operations are done in the order in which they were queued. A mark is a point in one of the two streams.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Word = tuple[int, int]  # of device memory: address, value


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream. Of two marks of one stream the later one has the larger ordinal."""

    ordinal: int
    stream: int  # whose: a handle, told apart and nothing else
    event: object = field(default=None, compare=False, repr=False)


class Copier(Protocol):
    """Queues and returns; only `wait` and `drain` wait. One thread, which has the device's context.

    `orders_words`: a kernel that runs meanwhile may wait for a word. Else only who waits for a mark finds it.
    """

    @property
    def orders_words(self) -> bool: ...

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        """A block: from pinned memory at `source` to device memory at `into`."""
        ...

    def write(self, address: int, value: int) -> None:
        """One 64-bit word of device memory. Whoever sees it sees every copy that was queued before it."""
        ...

    def write_many(self, words: Sequence[Word]) -> None:
        """Each one after the other as `write` has it, in one call where there is one."""
        ...

    def copied(self) -> Mark:
        """All that has been queued on the copy stream so far."""
        ...

    def computed(self) -> Mark:
        """All that has been queued on the current stream, the computing one, so far."""
        ...

    def join(self, mark: Mark) -> None:
        """What is queued on the current stream from now on comes after `mark`, which is of the copy stream."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is queued on the copy stream from now on comes after `mark`, which is of a computing stream."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to it."""
        ...

    def wait(self, mark: Mark) -> None:
        """Blocks the host until the device has come to it."""
        ...

    def drain(self) -> None:
        """Blocks the host until both streams have nothing left to do."""
        ...

    def close(self) -> None:
        """Gives the stream back, after all that was queued. Twice is once."""
        ...


class HostCopier:
    """Copies at once, between addresses of this process. Whatever was marked has happened."""

    orders_words = True

    def __init__(self) -> None:
        self._marks = 0

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        ctypes.memmove(into, source, size_bytes)

    def write(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def write_many(self, words: Sequence[Word]) -> None:
        for address, value in words:
            self.write(address, value)

    def copied(self) -> Mark:
        self._marks += 1
        return Mark(self._marks, 1)

    def computed(self) -> Mark:
        self._marks += 1
        return Mark(self._marks, 0)

    def join(self, mark: Mark) -> None:
        """It has happened."""

    def follow(self, mark: Mark) -> None:
        """It has happened."""

    def passed(self, mark: Mark) -> bool:
        return True

    def wait(self, mark: Mark) -> None:
        """It has happened."""

    def drain(self) -> None:
        """Nothing is ever left to do."""

    def close(self) -> None:
        """There is nothing to give back."""


class PacedCopier:
    """Another copier whose copies take as long as they would over a link of that rate, on the real clock.

    The host sleeps until the block would have come, then queues the copy. So nothing is there too early, and whatever
    the caller would have done meanwhile waits too: an answer is never quicker than over such a link, sometimes slower.
    """

    def __init__(
        self, below: Copier, bytes_per_second: float, clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        assert bytes_per_second > 0, "a pace is positive"
        self._below = below
        self.bytes_per_second = bytes_per_second
        self.orders_words = below.orders_words
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0  # when the line has done all that was asked for
        self.write, self.write_many = below.write, below.write_many
        self.copied, self.computed = below.copied, below.computed
        self.join, self.follow, self.passed = below.join, below.follow, below.passed
        self.wait, self.drain, self.close = below.wait, below.drain, below.close

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        self._free_at = max(self._clock(), self._free_at) + size_bytes / self.bytes_per_second
        if (left := self._free_at - self._clock()) > 0:
            self._sleep(left)
        self._below.copy(source, into, size_bytes)
