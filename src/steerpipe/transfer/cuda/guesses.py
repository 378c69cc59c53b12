"""Guesses on the copy stream: a block moves in chunks behind what is demanded, is continued by demand, or is cut.

The stream cannot be reordered, so only a few chunks are ever on it: a demand waits for those at most. The host sends
more whenever it passes by (`pump`): when a layer was served or followed, when a lease ends, when a guess is made. Only
behind a step's last layer more is queued at once (`send_last`).
"""

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steerpipe.store.lending import LendingTable
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier, Mark
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.room import Room
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.throttle import Throttle

CHUNK_BYTES = 4608 << 10  # 85 us of a Gen5 link, which pauses for 2.3 at the end of each
WINDOW = 1  # chunks on the stream
MOST_LAST = 8  # chunks behind a step's last layer


@dataclass(slots=True)
class Guess:
    """An expert that may be wanted. Without a slot it waits for one; a ring brings what is not pinned."""

    reason: Reason
    deadline: float  # on time.perf_counter
    moved_bytes: int = 0


class Guesses(Room):
    """A guess is in one of three places: `asked` (no slot yet), `moving`, or `loading` (the ring's)."""

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: LendingTable, transient_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(layers, backing, memory, copier, table, transient_limit)
        self.chunk_bytes = CHUNK_BYTES
        self.window = WINDOW
        self.moving: dict[int, Guess] = {}  # LOADING, and partly copied
        self._order: Sequence[int] = ()  # the same, in the order of sending
        self.throttle = Throttle()
        self._sent_ahead: set[int] = set()  # guesses that were begun, until their layer comes
        self._ends = {self.base[layer]: self.base[layer] + each.experts for layer, each in layers.items()}
        self._asked: dict[int, Guess] = {}
        self._read: dict[int, Guess] = {}  # sent for by the ring
        self._sent: deque[Mark] = deque()  # behind each chunk
        self._soonest = math.inf  # no deadline is sooner
        self._last_bytes = 0  # see `send_last`: a chunk at least
        self._last: Mark | None = None  # behind them

    def guess(self, numbers: Iterable[int], reason: Reason, deadline: float) -> int:
        """Wants experts that are not there; how many are on their way or wait for a slot. Nothing is evicted now."""
        assert reason is not Reason.DEMAND, "a demand is made by a lease, or served"
        coming, self._stuck = 0, False
        self._soonest = min(self._soonest, deadline)
        for number in numbers:
            known = self.moving.get(number) or self._asked.get(number) or self._read.get(number)
            if known is not None:  # perhaps sooner than before
                known.reason, known.deadline = min(known.reason, reason), max(known.deadline, deadline)
                coming += 1
            elif self.table.state(self.experts[number]) is Residency.ABSENT:
                self._asked[number] = Guess(reason, deadline)
                coming += 1
        return coming

    def expect(self, numbers: Sequence[int]) -> None:
        """All that is expected now, in the order of sending; what was expected before and is not any more is cut.

        Demand takes no slot of an expected expert where it finds another. Nothing is sent while too few of the last
        guesses were used.
        """
        if not self.throttle.allows():
            numbers = ()
        before, self.expected = self.expected, frozenset(numbers)
        if dropped := before - self.expected:
            for number in [each for each in (*self.moving, *self._read, *self._asked) if each in dropped]:
                self._give_up(number)
        own: dict[int, Guess] = {}
        for number in numbers:
            if not self.here[number] and number not in self.moving:
                known = number in self._asked
                own[number] = self._asked.pop(number) if known else Guess(Reason.PREFETCH, math.inf)
        self._asked = own | self._asked if self._asked else own
        self._order, self._stuck = numbers, False

    @property
    def asked(self) -> Collection[int]:
        """Guesses without a slot. A view."""
        return self._asked

    def settle_guesses(self, first: int, routed: Collection[int]) -> None:
        """A layer has come whose experts begin at `first`: its guesses were right or wrong.

        What is left of them was not routed to, and must not move any more.
        """
        self._stuck = self._roomy = False
        end = self._ends[first]
        for number in [each for each in (*self._asked, *self.moving) if first <= each < end]:
            self._give_up(number)
        mine = [number for number in self._sent_ahead if first <= number < end]
        if mine:
            self.throttle.settle(len(mine), sum(number in routed for number in mine))
            self._sent_ahead.difference_update(mine)

    def lose_sight(self) -> None:
        """A step begins whose layers nobody settles guesses for: what was sent is neither right nor wrong."""
        self._sent_ahead.clear()
        self.forget_last()

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

    def pump(self) -> bool:
        """Sends chunks, as far as the stream has nothing else to do; whether it sent any. Waits for nothing."""
        return bool(self.moving or self._asked or self._read) and self._send_chunks()

    def send_last(self) -> None:
        """A step's last layer was served: nobody asks before the next one's first, so more is queued than between
        layers, at once. How much comes by then is found out (`judge_last`).

        Victims go first: the next step waits until they are out of the table, and not for the blocks.
        """
        self._last_bytes = max(self._last_bytes, self.chunk_bytes)
        left, coming = self._last_bytes, dict[int, int]()  # who → bytes
        for number in self._order:
            if left <= 0:
                break
            if number in self.moving or self._may_begin(number):
                coming[number] = min(left, self.size_of(number) - self.moving[number].moved_bytes)
                left -= coming[number]
        if self._clears:
            self.cleared, self._clears = self.copier.copied(), False
        for number, size_bytes in coming.items():
            self._move(number, size_bytes)
        if coming:
            mark = self.settle_marked() or self.copier.copied()
            self._sent.append(mark)
            self._last = None if left else mark

    def judge_last(self) -> None:
        """The next step's first layer asks: has all come that was queued behind the last one? More next time, or less.

        Twice as much less: a demand that waits costs more than a link that is idle.
        """
        if self._last is not None:
            more = self.chunk_bytes // 4 if self.copier.passed(self._last) else -self.chunk_bytes // 2
            self._last_bytes = max(self.chunk_bytes, min(self._last_bytes + more, MOST_LAST * self.chunk_bytes))
            self._last = None

    def forget_last(self) -> None:
        """Something else comes before the next served step: whether what was sent last came in time is not known."""
        self._last = None

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
        self._sent_ahead.clear()
        self.expected = frozenset()
        self.passed = 0

    def _send_chunks(self) -> bool:
        """Whether there was any to send."""
        while self._sent and self.copier.passed(self._sent[0]):
            self._sent.popleft()
        if len(self._sent) >= self.window or (self._stuck and not self.moving):
            return False
        if self._soonest < math.inf:
            self._expire()
        sent = False
        while len(self._sent) < self.window and (number := self._next_guess()) is not None:
            sent, mark = True, None
            if number in self.moving:  # else the ring brings it
                self._move(number, self.chunk_bytes)
                mark = self.settle_marked() or self.copier.copied()
                self._sent.append(mark)
            if self._clears:  # the chunk's mark will do: another one takes the host some microseconds
                self.cleared, self._clears = mark or self.copier.copied(), False
        return sent

    def _give_up(self, number: int) -> None:
        self._asked.pop(number, None)
        self._read.pop(number, None)
        coming = number in self.moving or self.loading.get(number, Reason.DEMAND) is not Reason.DEMAND
        if coming and not self.table.pins(self.experts[number]):  # who was sent ahead of a lease is pinned
            self.cut(number)

    def _expire(self) -> None:
        now_seconds = time.perf_counter()
        if now_seconds < self._soonest:
            return
        for guesses in (self._asked, self.moving, self._read):
            for number in [number for number, guess in guesses.items() if guess.deadline < now_seconds]:
                self._give_up(number)
        left = (guess.deadline for guesses in (self._asked, self.moving, self._read) for guess in guesses.values())
        self._soonest = min(left, default=math.inf)

    def _next_guess(self) -> int | None:
        """Who moves next: what is expected first, else what began first. None: nobody, or nobody has a slot."""
        for number in self._order:
            if number in self.moving:
                return number
            if number in self._asked and not self._has_come(number):
                if self._begin_guess(number):
                    return number
                break
        if self.moving:
            return next(iter(self.moving))
        for number in [number for number in self._read if number not in self.loading]:
            del self._read[number]  # it has come, or is demanded, or was cut
        asked = [each for each in tuple(self._asked) if not self._has_come(each)]
        if not asked:
            return None
        first = min(asked, key=lambda each: self._asked[each].reason)
        return first if self._begin_guess(first) else None

    def _may_begin(self, number: int) -> bool:
        """Whether it was asked for, lies in pinned memory, and has a slot now."""
        pinned = number in self._asked and bool(self.places[number])
        return pinned and not self._has_come(number) and self._begin_guess(number)

    def _has_come(self, number: int) -> bool:
        """Whether somebody else has brought it: then it is not asked for any more."""
        come = bool(self.here[number]) or number in self.loading
        if come:
            del self._asked[number]
        return come

    def _begin_guess(self, number: int) -> bool:
        """Gives it a slot; False: none may be had for a guess now."""
        guess = self._asked[number]
        self._stuck = self._stuck or not self.begin(
            number, guess.reason, transient=True, sparing=range(self.passed, len(self.experts))
        )
        if self._stuck:
            return False
        del self._asked[number]
        self._sent_ahead.add(number)
        self._clears = self._clears or bool(self._evicted)
        if self.places[number]:
            self.clear()
            self.guessed[number] = guess.reason
            self.moving[number] = guess
            del self._begun[number]
        else:
            self.fetch([number], guess.reason)
            self._read[number] = guess
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
