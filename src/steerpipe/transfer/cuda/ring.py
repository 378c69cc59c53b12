"""Blocks that have no place in pinned memory: reader threads bring them into a few pinned slabs, the copy follows.

A slab goes round: free → read into → landed → copied from → free, the last step when the copy's mark has passed.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from steerpipe.core.errors import TransferError
from steerpipe.transfer.cuda.copier import Copier, Mark
from steerpipe.transfer.slabs import Slab

Fetch = Callable[[int, Slab], None]  # an expert's block by its number, whole and checked; blocks; TransferError


class Landed(NamedTuple):
    """A block that was sent for. Without an error it lies in the slab, which goes back by `Ring.give_back`."""

    number: int
    slab: Slab
    error: TransferError | None


class Ring:
    """Reader threads and their slabs. All methods are for one thread, that of the copier; none but `landed` waits."""

    def __init__(self, fetch: Fetch, slabs: Sequence[Slab], copier: Copier, readers: int = 2) -> None:
        assert slabs, "a ring without slabs"
        self.slabs = len(slabs)
        self._all = tuple(slabs)
        self._fetch = fetch
        self._copier = copier
        lock = threading.RLock()  # a collected source closes itself, perhaps inside one of these methods
        self._work, self._changed = threading.Condition(lock), threading.Condition(lock)
        self._free = list(slabs)
        self._demanded: dict[int, None] = {}  # in the order of arrival
        self._guessed: dict[int, None] = {}
        self._reading: dict[int, bool] = {}  # → whether it is still wanted
        self._read_into: dict[int, Slab] = {}  # by the same numbers
        self._landed: deque[Landed] = deque()
        self._copying: deque[tuple[Mark, Slab]] = deque()
        self._closed = False
        self._crash: BaseException | None = None  # of a reader: a mistake of ours
        self._threads = [
            threading.Thread(target=self._run, name=f"steerpipe-ring-{number}", daemon=True)
            for number in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def outstanding(self) -> bool:
        """Whether anything that was sent for has not been handed out."""
        with self._work:
            return bool(self._demanded or self._guessed or self._landed or any(self._reading.values()))

    def send_for(self, number: int, *, urgent: bool) -> None:
        """Wants a block; what is urgent goes first. One that is on its way goes on, perhaps sooner."""
        with self._work:
            if number in self._reading:
                self._reading[number] = True
            elif all(number != landed.number for landed in self._landed) and number not in self._demanded:
                self._guessed.pop(number, None)
                (self._demanded if urgent else self._guessed)[number] = None
                self._work.notify()

    def drop(self, number: int) -> None:
        """Wants it no more: it is not read, or not handed out."""
        with self._work:
            self._demanded.pop(number, None)
            self._guessed.pop(number, None)
            if number in self._reading:
                self._reading[number] = False
            for landed in [each for each in self._landed if each.number == number]:
                self._landed.remove(landed)
                self._freed(landed.slab)

    def landed(self, *, wait: bool) -> Landed | None:
        """The next block that has come; None: there is none, or, with `wait`, nothing is outstanding."""
        while True:
            self._recycle()
            with self._changed:
                self._check_usable()
                if self._landed:
                    return self._landed.popleft()
                if not wait or not self.outstanding:
                    return None
                if self._free or not self._copying:
                    self._changed.wait()
                    continue
            self._copier.wait(self._copying[0][0])  # readers want slabs: there will be one when this copy is done

    def give_back(self, slab: Slab, after: Mark | None) -> None:
        """The slab may be read into again when the copy from it is done; None: there was no copy."""
        if after is not None:
            self._copying.append((after, slab))
            return
        with self._work:
            self._freed(slab)

    def mend(self, after: Mark) -> None:
        """After an interrupt: nothing is wanted, and slabs that somebody lost are free once `after` has passed."""
        with self._work:
            self._demanded.clear()
            self._guessed.clear()
            self._reading.update(dict.fromkeys(self._reading, False))
            while self._landed:
                self._copying.append((after, self._landed.popleft().slab))
            known = [*self._free, *self._read_into.values(), *(each.slab for each in self._landed)]
            known += [slab for _, slab in self._copying]
            found = {id(slab) for slab in known}
            self._copying.extend((after, slab) for slab in self._all if id(slab) not in found)

    def check_integrity(self) -> None:
        """When nothing is outstanding and all copies are done: every slab is free."""
        self._recycle()
        with self._changed:
            while self._reading:  # what nobody wants any more, to its end
                self._changed.wait()
            assert not self._copying, f"{len(self._copying)} slabs are being copied from"
            assert len(self._free) == self.slabs, f"{self.slabs - len(self._free)} slabs were never given back"

    def close(self) -> None:
        """Ends the threads after the block they are at. Waits for them. Twice is once."""
        with self._work:
            self._closed = True
            self._work.notify_all()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a collected source may close itself on any thread
                thread.join()
        self._free.clear()
        self._landed.clear()
        self._copying.clear()

    def _recycle(self) -> None:
        while self._copying and self._copier.passed(self._copying[0][0]):
            _, slab = self._copying.popleft()
            with self._work:
                self._freed(slab)

    def _freed(self, slab: Slab) -> None:
        self._free.append(slab)
        self._work.notify()

    def _check_usable(self) -> None:
        if self._crash is not None:
            raise RuntimeError("a reader thread has stopped: this is a mistake of ours") from self._crash
        if self._closed:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")

    # --- on the reader threads

    def _run(self) -> None:
        try:
            while (work := self._take()) is not None:
                self._bring(*work)
        except BaseException as problem:  # noqa: BLE001 (`landed` raises it again)
            with self._changed:
                self._crash = problem
                self._changed.notify_all()

    def _take(self) -> tuple[int, Slab] | None:
        """The next block to read, and where to. None: the ring is closed."""
        with self._work:
            while not self._closed:
                queue = self._demanded or self._guessed
                if queue and self._free:
                    number = next(iter(queue))
                    del queue[number]
                    self._reading[number] = True
                    self._read_into[number] = self._free.pop()
                    return number, self._read_into[number]
                self._work.wait()
        return None

    def _bring(self, number: int, slab: Slab) -> None:
        error = None
        try:
            self._fetch(number, slab)
        except TransferError as problem:
            error = problem
        with self._work:
            del self._read_into[number]
            if self._reading.pop(number):
                self._landed.append(Landed(number, slab, error))
            else:
                self._freed(slab)
            self._changed.notify_all()
