"""Guesses on the copy stream: a block moves in chunks behind what is demanded, is continued by demand, or is cut.

The stream cannot be reordered, so only a few chunks are ever on it: a demand waits for those at most. The host sends
more whenever it passes by (`pump`): when a layer was served or followed, when a lease ends, when a guess is made.

A guess takes its slot while kernels may be running, whose experts nobody has pinned. So its victims are of layers that
this step has passed (`passed`), and the next step waits until their entries are out of the table (`cleared`): then it
finds none of them (docs/adr/0008-cuda.md).
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from steerpipe.store.lending import LendingTable
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier, Mark
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.stock import Stock
from steerpipe.transfer.queue import Reason

CHUNK_BYTES = 1 << 20  # 20 us of the link
WINDOW = 2  # chunks on the stream: one moves, one follows it without a pause


@dataclass(slots=True)
class Guess:
    """An expert that may be wanted. Without a slot it waits for one; a ring brings what is not pinned."""

    reason: Reason
    deadline: float  # on time.perf_counter
    moved_bytes: int = 0


class Guesses(Stock):
    """A guess is in one of three places: `asked` (no slot yet), `moving`, or `loading` (the ring's)."""

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: LendingTable, transient_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(layers, backing, memory, copier, table, transient_limit)
        self.chunk_bytes = CHUNK_BYTES
        self.moving: dict[int, Guess] = {}  # LOADING, and partly copied
        self.passed = 0  # kernels of experts with smaller numbers have run in this step
        self.cleared: Mark | None = None  # after which the victims' entries are out of the table
        self._asked: dict[int, Guess] = {}
        self._read: dict[int, Guess] = {}  # sent for by the ring
        self._sent: deque[Mark] = deque()  # behind each chunk

    def guess(self, numbers: Iterable[int], reason: Reason, deadline: float) -> int:
        """Wants experts that are not there; how many are on their way or wait for a slot. Nothing is evicted now."""
        assert reason is not Reason.DEMAND, "a demand is made by a lease, or served"
        coming = 0
        for number in numbers:
            known = self.moving.get(number) or self._asked.get(number) or self._read.get(number)
            if known is not None:  # perhaps sooner than before
                known.reason, known.deadline = min(known.reason, reason), max(known.deadline, deadline)
                coming += 1
            elif self.table.state(self.experts[number]) is Residency.ABSENT:
                self._asked[number] = Guess(reason, deadline)
                coming += 1
        return coming

    def withdraw(self, numbers: Collection[int], reason: Reason) -> None:
        """Cuts what is under way for that reason or a lesser one. What is demanded by now goes on."""
        for number in numbers:
            known = self._asked.get(number) or self.moving.get(number) or self._read.get(number)
            if known is not None and known.reason >= reason:
                self._give_up(number)

    def hasten(self, numbers: Iterable[int]) -> None:
        """They are demanded: what is left of their blocks is queued at once, READY at the next `settle`."""
        for number in numbers:
            self._move(number, self.size_of(number))

    def step_begins(self) -> None:
        """What is queued on the current stream from now on finds no victim of a guess in the table."""
        self.passed = 0
        if self.cleared is not None:
            self.copier.join(self.cleared)
            self.cleared = None

    def pump(self) -> None:
        """Sends chunks, as far as the stream has nothing else to do. Waits for nothing."""
        if not self.moving and not self._asked and not self._read:
            return
        now_seconds = time.perf_counter()
        for guesses in (self._asked, self.moving, self._read):
            for number in [number for number, guess in guesses.items() if guess.deadline < now_seconds]:
                self._give_up(number)
        while self._sent and self.copier.passed(self._sent[0]):
            self._sent.popleft()
        while len(self._sent) < WINDOW and (self.moving or self._begin_guess()):
            if self.moving:
                self._move(next(iter(self.moving)), self.chunk_bytes)
                self.settle_marked()
                self._sent.append(self.copier.copied())

    def cut(self, number: int) -> None:
        """A LOADING guess that nobody waits for loses its slot; chunks that are queued end before others follow."""
        guess = self.moving.pop(number)
        counts = self.tally.of[guess.reason]
        counts.cancelled += 1
        counts.cancelled_bytes += guess.moved_bytes
        self.guessed.pop(number, None)
        self.table.abandon(self.experts[number])

    def forget_guesses(self) -> None:
        """After an interrupt: whoever has a slot and not its block loses it elsewhere."""
        self._asked.clear()
        self.moving.clear()
        self._read.clear()
        self._sent.clear()
        self.passed = 0

    def _give_up(self, number: int) -> None:
        self._asked.pop(number, None)
        self._read.pop(number, None)
        if number in self.moving or self.loading.get(number, Reason.DEMAND) is not Reason.DEMAND:
            self.cut(number)

    def _begin_guess(self) -> bool:
        """Gives the most urgent guess a slot; False: there is none, or no slot may be had for it now."""
        for number in [number for number in self._read if number not in self.loading]:
            del self._read[number]  # it has come, or is demanded, or was cut
        for number in [each for each in self._asked if self.table.state(self.experts[each]) is not Residency.ABSENT]:
            del self._asked[number]  # somebody else has brought it
        if not self._asked:
            return False
        number = min(self._asked, key=lambda each: self._asked[each].reason)
        guess = self._asked[number]
        spared = range(self.passed, len(self.experts))
        if not self.begin(number, guess.reason, transient=True, sparing=spared):
            return False
        del self._asked[number]
        evicts = bool(self._evicted)
        if self.places[number]:
            self.clear()
            self.guessed[number] = guess.reason
            self.moving[number] = guess
            del self._begun[number]
        else:
            self.fetch([number], guess.reason)
            self._read[number] = guess
        if evicts:
            self.cleared = self.copier.copied()
        return True

    def _move(self, number: int, most_bytes: int) -> None:
        """The next bytes of a block; after the last it is READY when its entry follows."""
        guess, size_bytes = self.moving[number], self.size_of(number)
        count, start = min(most_bytes, size_bytes - guess.moved_bytes), guess.moved_bytes
        slot = self.table.slot(self.experts[number])
        self.copier.copy(self.places[number] + start, self.memory.addresses[slot] + start, count)
        guess.moved_bytes += count
        counts = self.tally.of[guess.reason]
        counts.read_bytes += count
        if guess.moved_bytes == size_bytes:
            counts.transfers += 1
            self._queued.append(number)
            del self.moving[number]
