"""The state that leases and serving share: who lies in which slot, what is queued on the copy stream, who reads what.

Decisions are those of `store.residency` and `store.policies`; here they become operations in stream order. For an
expert that comes: entry of the victim := 0, block, its own entry := address. One thread; nothing waits but `land`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.counters import Tally
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier, Mark
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.ring import Landed
from steerpipe.transfer.queue import Reason

GROUP = 8  # copies that share a mark: a wave of a prompt


class Shelf:
    """See above. Experts go by their numbers. READY is meant in stream order: the copy is queued.

    A READY expert is there for whatever the copy stream does next; `arrivals` says after which mark it is there for
    the computing stream, and `readers` after which mark its slot may be written.
    """

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: SlotTable, transient_limit: int,
    ) -> None:  # fmt: skip
        self.backing, self.memory, self.copier, self.table = backing, memory, copier, table
        self.experts = table.experts
        self.transient_limit = transient_limit
        self.tally = Tally()
        self.now = 0  # tokens
        self.base: dict[int, int] = {}  # number of each layer's first expert
        self.here = bytearray(len(self.experts))  # whether an expert is READY
        self.arrivals: list[Mark | None] = [None] * memory.slots  # None: there already
        self.readers: list[Mark | None] = [None] * memory.slots  # None: nobody reads
        self.guessed: dict[int, Reason] = {}  # brought by a guess and not used yet
        self.loading: dict[int, Reason] = {}  # sent for by the ring
        self.broken: dict[int, TransferError] = {}  # LOADING, could not be had, and still pinned by who wants it
        self.served = False  # kernels may read slots that no mark of a reader stands for
        self._queued: list[int] = []  # copied, to be READY with the next mark
        self._sizes: list[int] = []
        for layer, each in layers.items():
            self.base[layer] = len(self._sizes)
            self._sizes += [each.block_bytes] * each.experts

    @property
    def has_room(self) -> bool:
        """More free slots than a prompt passes through: then nothing that comes is worth dropping."""
        return self.table.free_slots > self.transient_limit

    def order(self, number: int) -> tuple[bool, int, int]:
        """What is copied first: the pinned by address, then what the ring brings, by number."""
        address = self.backing.locate(number)
        return (not address, address, number)

    def begin(self, number: int, reason: Reason, *, transient: bool, sparing: Collection[int] = ()) -> bool:
        """Gives an ABSENT expert a slot and sends for it. False: no slot can be had now."""
        begun = self.reserve(number, reason, transient=transient, sparing=sparing)
        if begun:
            self.fetch(number, reason)
        return begun

    def reserve(self, number: int, reason: Reason, *, transient: bool, sparing: Collection[int] = ()) -> bool:
        """The first half of `begin`: a slot, out of which the one before it is gone in the order of the copy stream."""
        placement = self.table.begin(
            self.experts[number], transient=transient, now=self.now, speculative=reason is not Reason.DEMAND,
            sparing=sparing,
        )  # fmt: skip
        if placement is not None:
            self._clear(placement.slot, placement.evicted)
        return placement is not None

    def fetch(self, number: int, reason: Reason) -> None:
        """The second half: a copy from pinned memory, READY at the next `settle`; else the ring brings the block."""
        if reason is not Reason.DEMAND:
            self.guessed[number] = reason
        if source := self.backing.locate(number):
            self._copy(number, self.table.slot(self.experts[number]), source, reason)
            self._queued.append(number)
        else:
            assert self.backing.ring is not None, f"{self.experts[number]} lies nowhere"
            self.loading[number] = reason
            self.backing.ring.send_for(number, urgent=reason is Reason.DEMAND)

    def send(self, numbers: Iterable[int], *, transient: bool) -> list[int]:
        """Sends for ABSENT experts that nobody waits for yet, as far as there are slots; who is coming, pinned.

        Kernels that are queued from now on find none of the evicted in the table: a served step would read on where
        the copies are going. So entries are cleared first, for which the computing stream waits; the blocks follow.
        """
        self.meet()
        coming = []
        for number in numbers:
            if not self.reserve(number, Reason.PREFETCH, transient=transient):
                break
            self.table.pin(self.experts[number])
            coming.append(number)
        if coming:
            self.copier.join(self.copier.copied())
        for count, number in enumerate(coming, start=1):
            self.fetch(number, Reason.PREFETCH)
            if count % GROUP == 0 or count == len(coming):
                self.settle_marked()
        return coming

    def demand(self, number: int, *, transient: bool, sparing: Collection[int] = ()) -> bool:
        """`begin`, at the cost of guesses that are on their way where no slot is to be had."""
        transient = transient and not self.has_room
        while not (begun := self.begin(number, Reason.DEMAND, transient=transient, sparing=sparing)):
            guess = next(
                (each for each in reversed(self.guessed) if each in self.loading and not self._pins(each)), None
            )
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

    def settle(self, mark: Mark | None) -> None:
        """What was queued is READY: after `mark` for the computing stream; None: kernels wait for its entry."""
        for number in self._queued:
            expert = self.experts[number]
            self.arrivals[self.table.slot(expert)] = mark
            self.table.finish(expert)
        self._queued.clear()

    def settle_marked(self) -> Mark | None:
        """`settle` with a mark of now; None: nothing was queued."""
        if not self._queued:
            return None
        mark = self.copier.copied()
        self.settle(mark)
        return mark

    def there(self, number: int) -> Mark | None:
        """After which mark a READY expert is there; None: it is there now."""
        slot = self.table.slot(self.experts[number])
        mark = self.arrivals[slot]
        if mark is not None and self.copier.passed(mark):
            mark = self.arrivals[slot] = None
        return mark

    def meet(self) -> None:
        """Before leases that follow served layers: each stream goes on where the other one stands."""
        if self.served:
            self.copier.follow(self.copier.computed())
            self.copier.join(self.copier.copied())
            self.served = False

    def read(self, numbers: Iterable[int]) -> None:
        """Pinned experts were read by all that is queued on the current stream; they are unpinned."""
        mark: Mark | None = None
        for number in numbers:
            expert = self.experts[number]
            mark = mark or self.copier.computed()
            self.readers[self.table.slot(expert)] = mark
            self.table.unpin(expert)

    # --- what comes over the ring

    def land(self, *, wait: bool) -> None:
        """Queues the copies of blocks that have come. With `wait`, comes back when one has come at least."""
        ring = self.backing.ring
        if ring is None or not self.loading:
            return
        begin = time.perf_counter()
        landed = ring.landed(wait=wait)
        if wait:
            self.tally.stall_seconds += time.perf_counter() - begin
        while landed is not None:
            self._take(landed, ring.give_back)
            landed = ring.landed(wait=False)

    def let_go(self, number: int) -> None:
        """Takes one pin of a LOADING expert away. What nobody waits for any more is cut."""
        expert = self.experts[number]
        self.table.unpin(expert)
        if self.table.state(expert) is Residency.LOADING and not self.table.pins(expert):
            self.cut(number)

    def cut(self, number: int) -> None:
        """A LOADING, unpinned expert is not wanted any more, or cannot be had."""
        reason = self.loading.pop(number)
        if self.broken.pop(number, None) is None:
            assert self.backing.ring is not None, "only a ring loads"
            self.backing.ring.drop(number)
            self.tally.of[self.guessed.get(number, reason)].cancelled += 1
        self.guessed.pop(number, None)
        self.table.abandon(self.experts[number])

    # --- inside

    def _clear(self, slot: int, evicted: ExpertId | None) -> None:
        """The slot may be written by what is queued from now on, and nobody finds the old block any more."""
        reader = self.readers[slot]
        if reader is not None:
            self.copier.follow(reader)
            self.readers[slot] = None
        self.arrivals[slot] = None
        if evicted is not None:
            number = self.base[evicted.layer] + evicted.expert
            self.copier.write(self.memory.entries[number], 0)
            self.here[number] = 0
            self.guessed.pop(number, None)
            self.tally.evictions += 1

    def _copy(self, number: int, slot: int, source: int, reason: Reason) -> None:
        address, size_bytes = self.memory.addresses[slot], self._sizes[number]
        self.copier.copy(source, address, size_bytes)
        self.copier.write(self.memory.entries[number], address)
        self.here[number] = 1
        counts = self.tally.of[reason]
        counts.transfers += 1
        counts.read_bytes += size_bytes

    def _take(self, landed: Landed, give_back: Callable[..., None]) -> None:
        number = landed.number
        if landed.error is not None:
            self.tally.failures += 1
            give_back(landed.slab, None)
            self.broken[number] = landed.error
            if not self._pins(number):
                self.cut(number)
            return
        reason = self.loading.pop(number)
        self._copy(number, self.table.slot(self.experts[number]), landed.slab.tensor.data_ptr(), reason)
        self._queued.append(number)
        give_back(landed.slab, self.settle_marked())

    def _pins(self, number: int) -> int:
        return self.table.pins(self.experts[number])
