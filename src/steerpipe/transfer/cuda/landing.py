"""Slots that the device fills by itself while it computes one row: no host stands in the way of a step.

Where all blocks lie in pinned memory that kernels can read, an entry of the table never says "wait": it says where the
block is. The router takes tickets for slots out of a ring, the expert kernels store what they read there, and the host
follows some layers behind. All words go over the copy stream, in this order for each slot: the old owner's entry, the
ring's word, the tail; and a router reads the tail before the table (docs/adr/0008-cuda.md).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.blocks import DirectReads
from steerpipe.core.errors import TransferError
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.ahead import LayerAhead
from steerpipe.transfer.cuda.copier import PacedCopier
from steerpipe.transfer.cuda.memory import ENTRY_BYTES
from steerpipe.transfer.cuda.serving import Server
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason

RING = 64  # words; at most half of them are in use, so none is overwritten that a router may still read
MOST_SUPPLIED = RING // 2  # enough for ten layers that miss three experts each: so far may the host lag behind
LEAST_SLOTS = 32  # with fewer, leases and batches want every slot for themselves
NOMINEES = 16  # victims that are chosen at once
PINNED = -(1 << 63)  # the sign bit of an entry: the address is one in pinned memory


def supply_of(slots: int) -> int:
    """How many of them lie in the ring: a quarter at most."""
    return min(MOST_SUPPLIED, slots // 4)


def can_land(shelf: Shelf) -> bool:
    """Whether kernels can read every block, at the link's own pace, and are told in order what is theirs."""
    views = all(shelf.backing.view(number) for number in range(len(shelf.experts)))
    paced = isinstance(shelf.copier, PacedCopier)
    return views and not paced and shelf.copier.orders_words and supply_of(shelf.memory.slots) > 0


class SlotRing:
    """A Landing (core/blocks.py) over the slots of a shelf. One thread, the copier's.

    The n-th ticket ever is the n-th slot that was supplied. Between two layers that are followed, `taken` tickets are
    accounted for; the device may have taken more.
    """

    def __init__(
        self, shelf: Shelf, ahead: LayerAhead, server: Server, device: torch.device,
        closing: "weakref.finalize[..., Any]",
    ) -> None:  # fmt: skip
        """`closing`: of the source that all this belongs to."""
        views = [shelf.backing.view(number) for number in range(len(shelf.experts))]
        assert all(views), "every block has a place that kernels can read"
        self._shelf, self._ahead, self._server, self._closing = shelf, ahead, server, closing
        self._words = torch.zeros(RING + 4, dtype=torch.int64, device=device)  # aligned to 16 bytes, each of the three
        self.ring: Tensor = self._words[:RING]
        self.tail: Tensor = self._words[RING : RING + 1]
        self.head: Tensor = self._words[RING + 2 : RING + 3]
        self._first, self._tail = self.ring.data_ptr(), self.tail.data_ptr()
        self._most = supply_of(shelf.memory.slots)
        self._slots = [0] * RING  # of the ticket n at n % RING
        self._supplied = 0
        self.taken = 0
        self._adopted: set[int] = set()  # in this step
        self._last_layer = list(shelf.base)[-1]
        shelf.copier.drain()  # the zeros are written
        shelf.memory.absent = [view | PINNED for view in views]
        for entry, absent in zip(shelf.memory.entries, shelf.memory.absent, strict=True):
            shelf.copier.write(entry, absent)
        self._supply()
        shelf.copier.drain()  # no router may find an entry that is 0: it would wait, and nobody serves it

    @property
    def lent(self) -> list[int]:
        """Slots that the device may take, or has taken without our knowledge."""
        return [self._slots[ticket % RING] for ticket in range(self.taken, self._supplied)]

    def begin(self) -> int:
        """See Landing. TransferError if the source has been closed: its pinned memory must not be read any more."""
        if not self._closing.alive:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")
        if self._shelf.busy:
            self._server.release()
            self.restore()
        self._shelf.busy = True  # until the last layer was followed
        self._shelf.step_begins()
        if self._shelf.sent:
            self._ahead.drop(set())
        self._shelf.now += 1
        self._shelf.served = True
        self._adopted.clear()
        return self.taken

    def follow(self, layer: int, reads: DirectReads, ticket: int) -> int:
        """See Landing."""
        shelf = self._shelf
        shelf.served = True
        base, before = shelf.base[layer], self.taken
        for number in reads.landed:
            self._adopt(base + number, ticket)
            ticket += 1
        numbers = [base + index for index in dict.fromkeys(reads.routed)]
        missed = {base + index for index in reads.missed}
        shelf.table.touch_many(numbers, shelf.now)
        # Not for a layer that is followed again: a later one's slot may be half adopted then, and is in the ring still.
        if self.taken > before or (reads.missed and self.taken == self._supplied):
            self._supply()
        self._count(numbers, missed)
        shelf.passed = base  # its router has posted: earlier layers have run
        shelf.pump()
        shelf.busy = layer != self._last_layer
        return ticket

    def restore(self) -> None:
        """When nobody waits for the host: whatever was interrupted is made true again.

        Slots of layers that were not followed hold nobody knows what: the tickets are gone, and the slots are free.
        """
        shelf = self._shelf
        shelf.copier.drain()
        self.taken = int(self.head.item())
        lent = self.lent
        shelf.clear()
        shelf.table.mend(lent)
        for number, expert in enumerate(shelf.experts):
            held = shelf.table.state(expert) is Residency.READY
            shelf.here[number] = held
            place = shelf.memory.addresses[shelf.table.slot(expert)] if held else shelf.memory.absent[number]
            shelf.copier.write(shelf.memory.entries[number], place)
        for ticket, slot in enumerate(lent, start=self.taken):
            shelf.copier.write(self._first + ENTRY_BYTES * (ticket % RING), shelf.memory.addresses[slot])
        shelf.copier.write(self._tail, self._supplied)
        shelf.copier.drain()

    def check(self) -> None:
        """When the device has finished and every step was followed: both sides say the same."""
        shelf, lent, ring = self._shelf, self.lent, self.ring.tolist()
        assert self.tail.item() == self._supplied, f"{self.tail.item()} slots are supplied, not {self._supplied}"
        assert self.head.item() == self.taken, f"{self.head.item()} tickets were taken, {self.taken} followed"
        assert len(set(lent)) == len(lent) <= self._most, f"the ring holds {lent}"
        assert set(lent) == set(shelf.table.reserved), f"lent are {sorted(shelf.table.reserved)}, not {sorted(lent)}"
        for ticket, slot in enumerate(lent, start=self.taken):
            assert ring[ticket % RING] == shelf.memory.addresses[slot], f"ticket {ticket} leads elsewhere"

    def _adopt(self, number: int, ticket: int) -> None:
        """The block is in its slot, or will be before any kernel looks for it in the table: one stream computes."""
        if ticket < self.taken:
            return
        assert ticket == self.taken < self._supplied, f"ticket {ticket} of {self._supplied}, {self.taken} are taken"
        shelf, slot = self._shelf, self._slots[ticket % RING]
        if shelf.here[number] and shelf.table.slots_of([number]) != [slot]:
            # Its entry was on its way when the router looked: it has come twice. The slot is the next to be lent:
            # nobody but a later kernel may write there, after the one that is about to.
            shelf.table.give_back(slot)
        else:
            if number in shelf.moving:  # a guess, and too late
                shelf.cut(number)
            shelf.table.adopt(number, slot)
            shelf.copier.write(shelf.memory.entries[number], shelf.memory.addresses[slot])
            shelf.here[number] = 1
            self._adopted.add(number)
        self.taken = ticket + 1

    def _supply(self) -> None:
        """Fills the ring. The tail comes last: whoever sees it finds none of the old owners in the table."""
        shelf, table = self._shelf, self._shelf.table
        wanted = self._most - (self._supplied - self.taken)
        if table.nominees < wanted and table.free_slots + len(table.lingering) < wanted:
            table.nominate(max(wanted, NOMINEES), shelf.now)
        for slot in shelf.lend(wanted, {*self._adopted, *shelf.guessed}):
            at = self._supplied % RING
            self._slots[at] = slot
            self._supplied += 1
            shelf.copier.write(self._first + ENTRY_BYTES * at, shelf.memory.addresses[slot])
        shelf.copier.write(self._tail, self._supplied)

    def _count(self, numbers: Sequence[int], missed: set[int]) -> None:
        """As if it had been served; every miss moves its block, kept or not."""
        shelf, tally = self._shelf, self._shelf.tally
        claimed = 0
        if shelf.guessed or shelf.table.lingering:
            for number in numbers:
                if shelf.here[number] and (number in shelf.guessed or number in shelf.table.lingering):
                    reason = shelf.use(number, transient=False)
                    if reason is not Reason.DEMAND and number not in missed:
                        tally.of[reason].hits += 1
                        claimed += 1
        demand = tally.of[Reason.DEMAND]
        tally.leases += 1
        tally.leased += len(numbers)
        tally.misses += len(missed)
        demand.hits += len(numbers) - len(missed) - claimed
        demand.transfers += len(missed)
        demand.read_bytes += sum(shelf.size_of(number) for number in missed)
