"""Who lies in which slot, what is queued on the copy stream for it, and who reads what: decisions in stream order.

Decisions are those of `store.residency` and `store.policies`; here they become operations. For a group of experts that
come: entries of the victims := absent, the blocks one behind the other, their own entries := addresses. The link pauses
for a word between two blocks, so there are few such places. One thread; nothing waits.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from steerpipe.store.lending import LendingTable
from steerpipe.transfer.counters import Tally
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier, Mark, Word
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.queue import Reason

GROUP = 16  # copies that share a mark: a wave of a prompt


class Stock:
    """See above. Experts go by their numbers. READY is meant in stream order: the copy is queued.

    A READY expert is there for whatever the copy stream does next; `arrivals` says after which mark it is there for
    the computing stream, and `readers` after which mark its slot may be written.
    """

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: LendingTable, transient_limit: int,
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
        self.served = False  # kernels may read slots that no mark of a reader stands for
        self._begun: dict[int, None] = {}  # have slots, and were not sent for yet
        self._given: list[int] = []  # slots, to be cleared before the next copy
        self._evicted: list[int] = []  # out of them
        self._queued: list[int] = []  # copied, to be READY when their entries follow
        self._sizes: list[int] = []
        for layer, each in layers.items():
            self.base[layer] = len(self._sizes)
            self._sizes += [each.block_bytes] * each.experts
        self.places = [backing.locate(number) for number in range(len(self.experts))]  # in pinned memory; 0: the ring's

    @property
    def has_room(self) -> bool:
        """More free slots than a prompt passes through: then nothing that comes is worth dropping."""
        return self.table.free_slots > self.transient_limit

    def order(self, number: int) -> tuple[bool, int, int]:
        """What is copied first: the pinned by address, then what the ring brings, by number."""
        return (not self.places[number], self.places[number], number)

    def size_of(self, number: int) -> int:
        """Bytes of its block."""
        return self._sizes[number]

    def begin(self, number: int, reason: Reason, *, transient: bool, sparing: Collection[int] = ()) -> bool:
        """Gives an ABSENT expert a slot, for `fetch` to clear and fill. False: no slot can be had now."""
        placement = self.table.begin(
            self.experts[number], transient=transient, now=self.now, speculative=reason is not Reason.DEMAND,
            sparing=sparing,
        )  # fmt: skip
        if placement is not None:
            self._begun[number] = None
            self._given.append(placement.slot)
            if placement.evicted is not None:
                self._evicted.append(self.base[placement.evicted.layer] + placement.evicted.expert)
        return placement is not None

    def fetch(self, numbers: Sequence[int], reason: Reason) -> None:
        """Follows `begin`: copies from pinned memory, READY at the next `settle`; else the ring brings the blocks."""
        self.clear()
        for number, slot in zip(numbers, self.table.slots_of(numbers), strict=True):
            if reason is not Reason.DEMAND:
                self.guessed[number] = reason
            if source := self.places[number]:
                self._copy(number, slot, source, reason)
            else:
                assert self.backing.ring is not None, f"{self.experts[number]} lies nowhere"
                self.loading[number] = reason
                self.backing.ring.send_for(number, urgent=reason is Reason.DEMAND)
            del self._begun[number]

    def send(self, numbers: list[int], *, transient: bool, reason: Reason = Reason.PREFETCH) -> list[int]:
        """Sends for ABSENT experts that nobody waits for yet, as far as there are slots; who is coming.

        Kernels that are queued from now on find none of the evicted in the table: a served step would read on where
        the copies are going. So entries are cleared first, for which the computing stream waits; the blocks follow.
        """
        self.meet()
        slots, evicted = self.table.begin_many(numbers, transient=transient, now=self.now, speculative=True)
        coming = numbers[: len(slots)]
        self._begun.update(dict.fromkeys(coming))
        self._given += slots
        self._evicted += evicted
        self.clear()
        if coming:
            self.copier.join(self.copier.copied())
        for first in range(0, len(coming), GROUP):
            self.fetch(coming[first : first + GROUP], reason)
            self.settle_marked()
        return coming

    def lend(self, count: int, sparing: Collection[int], *, strict: bool) -> list[int]:
        """Up to `count` slots without owners; `clear` comes before anybody is told of them over the copy stream.

        Who is spared gives up his slot where there is no other, unless it is `strict`.
        """
        slots: list[int] = []
        while len(slots) < count:
            place = self.table.reserve(self.now, sparing) or (None if strict else self.table.reserve(self.now))
            if place is None:
                break
            slots.append(place.slot)
            self._given.append(place.slot)
            if place.evicted is not None:
                self._evicted.append(self.base[place.evicted.layer] + place.evicted.expert)
        return slots

    def settle(self) -> list[int]:
        """What was copied is READY, kernels may wait for its entries; its slots."""
        entries, addresses, slots = self.memory.entries, self.memory.addresses, self.table.slots_of(self._queued)
        words = [(entries[number], addresses[slot]) for number, slot in zip(self._queued, slots, strict=True)]
        self.copier.write_many(words)
        for number in self._queued:
            self.here[number] = 1
        self.table.finish_many(self._queued)
        self._queued.clear()
        return slots

    def settle_marked(self) -> Mark | None:
        """`settle` for who does not wait for entries: what was copied is there after that mark; None: nothing was."""
        if not self._queued:
            return None
        slots = self.settle()
        mark = self.copier.copied()
        for slot in slots:
            self.arrivals[slot] = mark
        return mark

    def there(self, slots: Iterable[int]) -> list[Mark | None]:
        """After which mark the READY expert of each slot is there; None: it is there now."""
        arrivals, passed = self.arrivals, {}
        found = [arrivals[slot] for slot in slots]
        for mark in found:
            if mark is not None and mark.ordinal not in passed:
                passed[mark.ordinal] = self.copier.passed(mark)
        return [None if mark is None or passed[mark.ordinal] else mark for mark in found]

    def meet(self) -> None:
        """Before leases that follow served layers: each stream goes on where the other one stands."""
        if self.served:
            self.copier.follow(self.copier.computed())
            self.copier.join(self.copier.copied())
            self.served = False

    def read(self, numbers: Sequence[int]) -> None:
        """Pinned experts were read by all that is queued on the current stream; they are unpinned."""
        if not numbers:
            return
        mark = self.copier.computed()
        for slot in self.table.slots_of(numbers):
            self.readers[slot] = mark
        self.table.unpin_many(numbers)

    def clear(self, before: Sequence[Word] = (), after: Sequence[Word] = ()) -> None:
        """Slots that were given may be written by what is queued now, and nobody finds the old blocks any more.

        `before` and `after`: words around those that say so; all of them go in one call.
        """
        readers: dict[int, Mark] = {}  # the last of each stream
        for slot in self._given:
            if (reader := self.readers[slot]) is not None:
                last = readers.get(reader.stream)
                if last is None or last.ordinal < reader.ordinal:
                    readers[reader.stream] = reader
        for reader in readers.values():
            self.copier.follow(reader)
        for slot in self._given:  # only now: an interrupt must not forget them
            self.readers[slot] = self.arrivals[slot] = None
        for number in self._evicted:
            self.here[number] = 0  # before its entry: who releases kernels knows then that they may wait for it
            self.guessed.pop(number, None)
        entries, absent = self.memory.entries, self.memory.absent
        gone = [(entries[number], absent[number]) for number in self._evicted]
        self.copier.write_many([*before, *gone, *after])
        self.tally.evictions += len(self._evicted)
        self._given.clear()
        self._evicted.clear()

    def _copy(self, number: int, slot: int, source: int, reason: Reason) -> None:
        """READY when its entry follows, at the next `settle`."""
        size_bytes = self._sizes[number]
        self.copier.copy(source, self.memory.addresses[slot], size_bytes)
        self._queued.append(number)
        counts = self.tally.of[reason]
        counts.transfers += 1
        counts.read_bytes += size_bytes
