"""The state that leases and serving share: `Guesses` over `Stock`, what the ring brings, and how all is mended.

One thread; nothing waits but `land`.
"""

import time
from collections.abc import Collection, Mapping, Sequence

from steerpipe.core.errors import TransferError
from steerpipe.store.lending import LendingTable
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.guesses import Guesses
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.stock import GROUP
from steerpipe.transfer.queue import Reason

__all__ = ["GROUP", "Shelf"]


class Shelf(Guesses):
    """See above. `busy`: a lease, a served step or something else has begun and has not ended.

    Whoever finds it busy came after an interrupt that nobody mended, and calls `Server.release` first.
    """

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: LendingTable, transient_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(layers, backing, memory, copier, table, transient_limit)
        self.busy = False
        self.sent: list[int] = []  # ahead of their layer, and pinned until it comes
        self.broken: dict[int, TransferError] = {}  # LOADING, could not be had, and still pinned by who wants it

    def demand(self, number: int, *, transient: bool, sparing: Collection[int] = ()) -> bool:
        """`begin`, at the cost of guesses that are on their way where no slot is to be had. `fetch` follows."""
        transient = transient and not self.has_room
        while not (begun := self.begin(number, Reason.DEMAND, transient=transient, sparing=sparing)):
            under_way = (each for each in reversed(self.guessed) if each in self.loading or each in self.moving)
            guess = next((each for each in under_way if not self._pins(each)), None)
            if guess is None:
                break
            self.cut(guess)
        return begun

    def use(self, number: int, *, transient: bool) -> Reason:
        """An expert that has a slot is wanted: says who brought it, a guess once, demand ever after."""
        if not transient or self.has_room:
            self.table.promote(self.experts[number])
        if self.loading.get(number, Reason.DEMAND) is not Reason.DEMAND:
            assert self.backing.ring is not None, "only a ring loads"
            self.loading[number] = Reason.DEMAND
            self.backing.ring.send_for(number, urgent=True)
        return self.guessed.pop(number, Reason.DEMAND)

    def use_many(self, numbers: Sequence[int], kept: Collection[int] | None) -> list[Reason]:
        """`use` for READY experts, of which `kept` (None: all) are worth keeping."""
        self.table.promote_many(
            numbers if kept is None or self.has_room else [number for number in numbers if number in kept]
        )
        return [self.guessed.pop(number, Reason.DEMAND) for number in numbers]

    def land(self, *, wait: bool) -> None:
        """Queues the copies of blocks that have come. With `wait`, comes back when one has come at least."""
        ring = self.backing.ring
        if ring is None or not self.loading:
            return
        begin = time.perf_counter()
        landed = ring.landed(wait=wait)
        if wait:
            self.tally.stall_seconds += time.perf_counter() - begin
        slabs = []
        while landed is not None:
            if landed.error is not None:
                self._fail(landed.number, landed.error)
                ring.give_back(landed.slab, None)
            else:
                slot = self.table.slot(self.experts[landed.number])
                self._copy(landed.number, slot, landed.slab.tensor.data_ptr(), self.loading[landed.number])
                del self.loading[landed.number]
                slabs.append(landed.slab)
            landed = ring.landed(wait=False)
        mark = self.settle_marked()
        for slab in slabs:
            ring.give_back(slab, mark)

    def pump(self) -> bool:
        """Also queues the copies of blocks that the ring has brought for guesses."""
        if self.loading:
            self.land(wait=False)
        return super().pump()

    def let_go(self, number: int) -> None:
        """Takes one pin of a LOADING expert away. What nobody waits for any more is cut."""
        expert = self.experts[number]
        self.table.unpin(expert)
        if self.table.state(expert) is Residency.LOADING and not self.table.pins(expert):
            self.cut(number)

    def cut(self, number: int) -> None:
        """A LOADING, unpinned expert is not wanted any more, or cannot be had."""
        if number in self.moving:
            super().cut(number)
            return
        reason = self.loading.pop(number)
        if self.broken.pop(number, None) is None:
            assert self.backing.ring is not None, "only a ring loads"
            self.backing.ring.drop(number)
            self.tally.of[self.guessed.get(number, reason)].cancelled += 1
        self.guessed.pop(number, None)
        self.table.abandon(self.experts[number])

    def mend(self) -> None:
        """After an interrupt, wherever it came; no lease goes on. Nothing is held, and who has a slot has its block.

        What the ring was to bring is given up; what was copied is READY; the others that were given slots lose them.
        Nothing on the computing stream may be waiting for an entry. May be interrupted and called again.
        """
        self.copier.follow(self.copier.computed())  # who was evicted may be in use, and the mark of that is lost
        self.sent.clear()
        self.forget_guesses()
        self.loading.clear()
        self.broken.clear()
        self.clear()
        self.table.mend(set(self.table.reserved))
        queued = set(self._queued)
        for number, expert in enumerate(self.experts):
            self._mend(number, queued, self.table.state(expert))
        self._begun.clear()
        self._queued.clear()
        self.served = True  # kernels may read what no mark stands for
        mark = self.copier.copied()
        self.copier.join(mark)
        if self.backing.ring is not None:
            self.backing.ring.mend(mark)
        counts = self.tally
        counts.leased = counts.misses + sum(each.hits + each.late for each in counts.of.values())

    def _mend(self, number: int, queued: set[int], state: Residency) -> None:
        """One expert: its state, its entry and `here` say the same."""
        expert, entry = self.experts[number], self.memory.entries[number]
        if state is Residency.LOADING and number not in queued:
            self.table.abandon(expert)
        elif state is Residency.LOADING or (state is Residency.READY and not self.here[number]):
            slot = self.table.slot(expert)
            self.copier.write(entry, self.memory.addresses[slot])
            self.arrivals[slot] = self.copier.copied()
            self.here[number] = 1
            if state is Residency.LOADING:
                self.table.finish(expert)
        if state is not Residency.READY and number not in queued:
            self.guessed.pop(number, None)
            if self.here[number]:
                self.copier.write(entry, self.memory.absent[number])
                self.here[number] = 0

    def _fail(self, number: int, error: TransferError) -> None:
        self.tally.failures += 1
        self.broken[number] = error
        if not self._pins(number):
            self.cut(number)

    def _pins(self, number: int) -> int:
        return self.table.pins(self.experts[number])
