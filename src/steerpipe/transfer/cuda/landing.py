"""Slots that the device fills by itself while it computes one row: no host stands in the way of a step.

Where all blocks lie in pinned memory that kernels can read, an entry of the table never says "wait": it says where the
block is. The router takes tickets for slots out of a ring, the expert kernels store what they read there, and the host
follows some layers behind. A router reads the tail of the ring before the table (docs/adr/0008-cuda.md).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.blocks import DirectReads
from steerpipe.core.errors import TransferError
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.ahead import LayerAhead
from steerpipe.transfer.cuda.copier import PacedCopier, Word
from steerpipe.transfer.cuda.lent import MOST_SUPPLIED, LentSlots
from steerpipe.transfer.cuda.sending import NOBODY, GuessSlots, guesses_of
from steerpipe.transfer.cuda.serving import Server
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason

LEAST_SLOTS = 32  # with fewer, leases and batches want every slot for themselves
LAYERS_LENT = 2
PINNED = -(1 << 63)  # the sign bit of an entry: the address is one in pinned memory


def supply_of(slots: int, routed: int) -> int:
    """How many of them lie in the ring, a quarter at most, where a layer wants `routed` experts.

    They hold nobody meanwhile, so there are few: for a layer, and for another one while the host follows the first.
    """
    return min(MOST_SUPPLIED, slots // 4, LAYERS_LENT * routed)


def can_land(shelf: Shelf) -> bool:
    """Whether kernels can read every block, at the link's own pace, and are told in order what is theirs."""
    views = all(shelf.backing.view(number) for number in range(len(shelf.experts)))
    paced = isinstance(shelf.copier, PacedCopier)
    return views and not paced and shelf.copier.orders_words and supply_of(shelf.table.least_slots, routed=1) > 0


class SlotRing:
    """A Landing (core/blocks.py) over the slots of a shelf. One thread, the copier's."""

    def __init__(
        self, shelf: Shelf, ahead: LayerAhead, server: Server, device: torch.device,
        closing: "weakref.finalize[..., Any]",
    ) -> None:  # fmt: skip
        """`closing`: of the source that all this belongs to."""
        views = [shelf.backing.view(number) for number in range(len(shelf.experts))]
        assert all(views), "every block has a place that kernels can read"
        self._shelf, self._ahead, self._server, self._closing = shelf, ahead, server, closing
        shelf.memory.absent = [view | PINNED for view in views]
        self._slots = LentSlots(shelf, device, supply_of(shelf.table.least_slots, routed=1))
        self._ran = False  # a direct step has, since the last `pause`: its entries may be late
        most = guesses_of(shelf.table.least_slots)
        self.guesses = GuessSlots(shelf, device, most) if most else None
        shelf.copier.drain()  # the zeros are written
        for entry, absent in zip(shelf.memory.entries, shelf.memory.absent, strict=True):
            shelf.copier.write(entry, absent)
        self._slots.supply(())
        shelf.copier.drain()  # no router may find an entry that is 0: it would wait, and nobody serves it

    @property
    def ring(self) -> Tensor:
        return self._slots.ring

    @property
    def tail(self) -> Tensor:
        return self._slots.tail

    @property
    def head(self) -> Tensor:
        return self._slots.head

    @property
    def taken(self) -> int:
        return self._slots.taken

    @property
    def lent(self) -> list[int]:
        """Slots that the device may take, or has taken without our knowledge: for misses and for guesses."""
        return [slot for ring in self._rings for slot in ring.lent]

    def begin(self) -> int:
        """See Landing. TransferError if the source has been closed: its pinned memory must not be read any more."""
        if not self._closing.alive:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")
        if self._shelf.busy:
            self._server.release()
            self.restore()
        self._shelf.busy = True  # until `end`
        self._shelf.step_begins()
        if self._shelf.sent:
            self._ahead.drop(set())
        self._shelf.now += 1
        self._shelf.served = True
        self._shelf.lose_sight()
        self._ran = True
        if self._slots.empty:
            self._slots.supply_anew(self._shelf.guessed)
        return self._slots.taken

    def pause(self) -> None:
        """A served step begins, of one row or of many: nobody takes slots in it, so none is lent.

        What came for the next step's first layer loses its slot, so its tags go, too: steps of many rows count stamps
        of their own. Whoever is given the slots waits for kernels that are queued: one may be about to store what has
        come twice, in a slot that is the next to be lent.
        """
        guesses = self.guesses is not None and self.guesses.pending
        if guesses or not self._slots.empty:
            copier = self._shelf.copier
            copier.follow(copier.computed())
        if guesses:
            self.drop_guesses()
        if not self._slots.empty:
            self._slots.withdraw()
        if self._ran:  # an entry that is late would let a layer pass before its newcomers are there
            copier = self._shelf.copier
            copier.join(copier.copied())
            self._ran = False

    def follow(self, layer: int, reads: DirectReads, ticket: int) -> int:
        """See Landing."""
        shelf = self._shelf
        shelf.served = True
        base, before, words = shelf.base[layer], self._slots.taken, list[Word]()
        for number in reads.landed:
            self._adopt(base + number, ticket, words)
            ticket += 1
        numbers = [base + index for index in dict.fromkeys(reads.routed)]
        missed = {base + index for index in reads.missed}
        shelf.table.touch_many(numbers, shelf.now)
        # Not for a layer that is followed again: a later one's slot may be half adopted then, and is in the ring still.
        if self._slots.taken > before or (reads.missed and self._slots.empty):
            self._slots.grow(supply_of(shelf.table.least_slots, len(numbers)))
            self._slots.supply({*numbers, *shelf.guessed}, first=words)
        self._count(numbers, missed, len(reads.sent))
        shelf.passed = base  # its router has posted: earlier layers have run
        shelf.pump()
        return ticket

    def end(self) -> None:
        """See Landing."""
        self._shelf.busy = False

    def restore(self) -> None:
        """When nobody waits for the host: whatever was interrupted is made true again.

        Slots of layers that were not followed hold nobody knows what: the tickets are gone, and the slots are free.
        """
        shelf = self._shelf
        shelf.copier.drain()
        lent = [*self._slots.forget(), *(self.guesses.forget() if self.guesses is not None else ())]
        shelf.clear()
        shelf.table.mend(lent)
        for number, expert in enumerate(shelf.experts):
            held = shelf.table.state(expert) is Residency.READY
            shelf.here[number] = held
            place = shelf.memory.addresses[shelf.table.slot(expert)] if held else shelf.memory.absent[number]
            shelf.copier.write(shelf.memory.entries[number], place)
        for ring in self._rings:
            ring.restore()
        shelf.copier.drain()

    def drop_guesses(self) -> None:
        """Between two steps: what was sent for the next one's first layer is given up, and no slot is lent for any."""
        if self.guesses is not None:
            self.guesses.rest(0)
            self.guesses.tags.fill_(NOBODY)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """While the device is idle: slots that were lent lie elsewhere now."""
        self._slots.relocate(moves)
        if self.guesses is not None:
            self.guesses.relocate(moves)

    def check(self) -> None:
        """When the device has finished and every step was followed: both sides say the same."""
        lent, reserved = self.lent, self._shelf.table.reserved
        self._slots.check()
        if self.guesses is not None:
            self.guesses.check()
        assert len(set(lent)) == len(lent), f"the rings hold {lent}"
        assert set(lent) == set(reserved), f"lent are {sorted(reserved)}, not {sorted(lent)}"

    @property
    def _rings(self) -> list[LentSlots]:
        return [self._slots, *([] if self.guesses is None else [self.guesses.slots])]

    def _adopt(self, number: int, ticket: int, words: list[Word]) -> None:
        """The block is in its slot, or will be before any kernel looks for it in the table: one stream computes. Its
        entry is to be written: `words`."""
        if ticket < self._slots.taken:
            return
        assert ticket == self._slots.taken, f"ticket {ticket}, {self._slots.taken} are taken"
        shelf, slot = self._shelf, self._slots.take()
        if shelf.here[number] and shelf.table.slots_of([number]) != [slot]:
            # Its entry was on its way when the router looked: it has come twice. The slot is the next to be lent:
            # nobody but a later kernel may write there, after the one that is about to.
            shelf.table.give_back(slot)
        else:
            if number in shelf.moving:  # a guess, and too late
                shelf.cut(number)
            shelf.table.adopt(number, slot)
            words.append((shelf.memory.entries[number], shelf.memory.addresses[slot]))
            shelf.here[number] = 1
        self._slots.taken = ticket + 1

    def _count(self, numbers: Sequence[int], missed: set[int], sent: int) -> None:
        """As if it had been served; every miss moves its block, kept or not. `sent`: counted when they are settled."""
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
        demand.hits += len(numbers) - len(missed) - sent - claimed
        demand.transfers += len(missed)
        demand.read_bytes += sum(shelf.size_of(number) for number in missed)
