"""The copier of a GPU: one stream of our own, beside whatever stream computes."""

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from steerpipe.core.errors import SteerpipeError
from steerpipe.transfer.cuda.copier import Copier, HostCopier, Mark
from steerpipe.transfer.cuda.driver import Driver, WordBatch
from steerpipe.transfer.cuda.pinned import PinnedArena

_WORDS = 4096  # of the fallback for writes
_WORD_BYTES = 8
_EVENTS = 64  # of the copy stream
_PROBE = 0x5EED_0123_4567_89AB


def copier_for(device: torch.device) -> Copier:
    """The one that goes with a device."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class CudaCopier:
    """See Copier. Blocks come from registered memory, else the driver would copy them by way of its own, and wait.

    Entries are written by the driver's own operation, or (`copied_words`, and where the driver has none) copied from a
    page of words: that keeps to the copy engine, and `bench link` says which costs the link less.
    """

    def __init__(self, device: torch.device, *, copied_words: bool = False) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        torch.cuda.set_device(self.device)
        probe = torch.zeros(1, dtype=torch.int64, device=self.device)  # makes torch's context current in this thread
        self.driver = Driver()
        self._handle = self.driver.new_stream()
        self.stream = torch.cuda.ExternalStream(self._handle, device=self.device)
        self._htod, self._write64 = self.driver.htod, self.driver.write64
        self._words: PinnedArena | None = None  # where writes come from if the driver has none of its own
        self._next_word = 0
        self._marks = 0
        self._passed = 0  # the ordinal of a mark of the copy stream: it and all before it have passed
        self._copied: deque[Mark] = deque()  # of the copy stream, in order: events are used again when they have passed
        self._joined: dict[int, int] = {}  # stream → ordinal of the last mark that it waits for
        self._followed: dict[int, int] = {}
        self._close = weakref.finalize(self, _close, self.driver, self._handle)
        if copied_words or not self._can_write(probe):
            self._words = PinnedArena(_WORDS * _WORD_BYTES, self.driver)
            self._words.pin()
        self._batch = self._open_batch(probe)

    @property
    def orders_words(self) -> bool:
        """Copied words are whole for who waits for their mark; nothing is said of kernels that look meanwhile."""
        return self._words is None

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        if status := self._htod(into, source, size_bytes, self._handle):
            self.driver.check(status)

    def write(self, address: int, value: int) -> None:
        if self._words is not None:
            self._write_by_copy(address, value)
        elif status := self._write64(self._handle, address, value, 0):  # type: ignore[misc] # else there are words
            self.driver.check(status)

    def write_many(self, words: Sequence[tuple[int, int]]) -> None:
        """Two words in one call take the link and the host less time than in two."""
        if self._batch is not None and len(words) > 1:
            self._batch.write(self._handle, words)
        else:
            for address, value in words:
                self.write(address, value)

    def copied(self) -> Mark:
        """An event that has passed is taken again: making one costs the host as much as a copy."""
        event = None
        if len(self._copied) == _EVENTS:
            oldest = self._copied.popleft()
            event = oldest.event if self.passed(oldest) else None
        mark = self._mark(self.stream, self._handle, event)
        self._copied.append(mark)
        return mark

    def computed(self) -> Mark:
        stream = torch.cuda.current_stream(self.device)
        return self._mark(stream, stream.cuda_stream)

    def join(self, mark: Mark) -> None:
        if mark.ordinal <= self._passed:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._joined.get(stream.cuda_stream, 0) < mark.ordinal:
            assert isinstance(mark.event, torch.cuda.Event), "a mark of another copier"
            stream.wait_event(mark.event)
            self._joined[stream.cuda_stream] = mark.ordinal

    def follow(self, mark: Mark) -> None:
        if self._followed.get(mark.stream, 0) < mark.ordinal:
            assert isinstance(mark.event, torch.cuda.Event), "a mark of another copier"
            self.stream.wait_event(mark.event)
            self._followed[mark.stream] = mark.ordinal

    def passed(self, mark: Mark) -> bool:
        if mark.stream == self._handle and mark.ordinal <= self._passed:
            return True
        assert isinstance(mark.event, torch.cuda.Event), "a mark of another copier"
        passed = bool(mark.event.query())
        if passed and mark.stream == self._handle:
            self._passed = mark.ordinal
        return passed

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark.event, torch.cuda.Event), "a mark of another copier"
        if mark.stream != self._handle or mark.ordinal > self._passed:
            mark.event.synchronize()

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self._close()

    def _mark(self, stream: torch.cuda.Stream, handle: int, used: object = None) -> Mark:
        event = used if isinstance(used, torch.cuda.Event) else torch.cuda.Event()
        event.record(stream)
        self._marks += 1
        return Mark(self._marks, handle, event)

    def _can_write(self, word: torch.Tensor) -> bool:
        """Whether the driver can write single words in stream order."""
        torch.cuda.synchronize(self.device)
        if self._write64 is None or self._write64(self._handle, word.data_ptr(), _PROBE, 0):
            return False
        self.driver.synchronize(self._handle)
        return bool(word.item() == _PROBE)

    def _open_batch(self, word: torch.Tensor) -> WordBatch | None:
        """None: the driver writes words one by one, or not at all."""
        if self._words is not None or self.driver.write_batch is None:
            return None
        batch = WordBatch(self.driver)
        with suppress(SteerpipeError):
            batch.write(self._handle, [(word.data_ptr(), 0), (word.data_ptr(), -_PROBE)])
            self.driver.synchronize(self._handle)
            return batch if word.item() == -_PROBE else None
        return None

    def _write_by_copy(self, address: int, value: int) -> None:
        assert self._words is not None, "there is a page of words"
        if self._next_word == _WORDS:  # all have been used once: they are free when their copies are done
            self.driver.synchronize(self._handle)
            self._next_word = 0
        source = self._words.address + _WORD_BYTES * self._next_word
        self._next_word += 1
        ctypes.c_int64.from_address(source).value = value
        self.copy(source, address, _WORD_BYTES)


def _close(driver: Driver, stream: int) -> None:
    with suppress(SteerpipeError):  # the driver may be gone already: the interpreter ends, or the GPU has failed
        driver.activate()
        driver.free_stream(stream)
