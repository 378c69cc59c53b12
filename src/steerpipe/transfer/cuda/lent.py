"""A ring of slots that are lent to the device: it takes them in order, and the host follows.

The n-th ticket ever is the n-th slot that was supplied. All words go over the copy stream, in this order for each slot:
the old owner's entry, the ring's word, the tail (docs/adr/0008-cuda.md).
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from steerpipe.transfer.cuda.copier import Word
from steerpipe.transfer.cuda.memory import ENTRY_BYTES
from steerpipe.transfer.cuda.shelf import Shelf

RING = 64  # words; at most half of them are in use, so none is overwritten that a kernel may still read
MOST_SUPPLIED = RING // 2
NOMINEES = 8  # victims that are chosen at once: who comes meanwhile is not among them


class LentSlots:
    """Between two layers that are followed, `taken` tickets are accounted for; the device may have taken more."""

    def __init__(self, shelf: Shelf, device: torch.device, most: int) -> None:
        """`most` slots are lent at a time; none of them yet."""
        assert most <= MOST_SUPPLIED, f"{most} slots in a ring of {RING}"
        self._shelf = shelf
        self.most = most  # at a time
        self._words = torch.zeros(RING + 4, dtype=torch.int64, device=device)  # aligned to 16 bytes, each of the three
        self.ring: Tensor = self._words[:RING]
        self.tail: Tensor = self._words[RING : RING + 1]
        self.head: Tensor = self._words[RING + 2 : RING + 3]
        self._first, self._tail = self.ring.data_ptr(), self.tail.data_ptr()
        self._slots = [0] * RING  # of the ticket n at n % RING
        self._supplied = 0
        self.taken = 0

    @property
    def lent(self) -> list[int]:
        """Slots that the device may take, or has taken without our knowledge."""
        return [self._slots[ticket % RING] for ticket in range(self.taken, self._supplied)]

    @property
    def empty(self) -> bool:
        return self.taken == self._supplied

    def grow(self, most: int) -> None:
        """Never less: a slot that a landed block does not need is lent again at once, while kernels may still write to
        it; where enough others were lent, somebody else would get it."""
        assert most <= MOST_SUPPLIED, f"{most} slots in a ring of {RING}"
        self.most = max(self.most, most)

    def take(self) -> int:
        """The slot of the next ticket that is accounted for. `taken` follows when that is done."""
        assert self.taken < self._supplied, f"ticket {self.taken} of {self._supplied}"
        return self._slots[self.taken % RING]

    def supply(self, sparing: Collection[int], *, strict: bool = False, first: Sequence[Word] = ()) -> None:
        """Fills the ring. The tail comes last: whoever sees it finds none of the old owners in the table.

        `sparing`: who keeps his slot as long as there are others; `strict`: in any case. `first`: words that are
        written before.
        """
        shelf, table = self._shelf, self._shelf.table
        wanted = self.most - (self._supplied - self.taken)
        if table.nominees < wanted and table.free_slots + len(table.lingering) < wanted:
            table.nominate(max(wanted, NOMINEES), shelf.now)
        words = list[Word]()
        for slot in shelf.lend(max(0, wanted), sparing, strict=strict):
            at = self._supplied % RING
            self._slots[at] = slot
            self._supplied += 1
            words.append((self._first + ENTRY_BYTES * at, shelf.memory.addresses[slot]))
        shelf.clear(before=first, after=[*words, (self._tail, self._supplied)])

    def supply_anew(self, sparing: Collection[int], *, strict: bool = False) -> None:
        """Between two steps, when none is lent: `supply`, which the next step on the current stream waits for."""
        copier = self._shelf.copier
        copier.follow(copier.computed())  # kernels of a served step may still wait for an entry
        self.supply(sparing, strict=strict)
        copier.join(copier.copied())  # a tail from before `withdraw` must not be seen

    def withdraw(self) -> None:
        """While nobody on the device takes any: all of them are free again."""
        for slot in self.lent:
            self._shelf.table.give_back(slot)
        self._supplied = self.taken
        self._shelf.copier.write(self._tail, self._supplied)

    def forget(self) -> list[int]:
        """After an interrupt, when the device is idle: whatever it took is accounted for. What is left in the ring."""
        self.taken = int(self.head.item())
        self._supplied = max(self._supplied, self.taken)  # what was taken may have been withdrawn
        return self.lent

    def restore(self) -> None:
        """The device's words, anew from what the host knows."""
        self.relocate({})
        self._shelf.copier.write(self._tail, self._supplied)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """While the device is idle: a slot that was lent lies elsewhere now."""
        for ticket in range(self.taken, self._supplied):
            at = ticket % RING
            slot = self._slots[at] = moves.get(self._slots[at], self._slots[at])
            self._shelf.copier.write(self._first + ENTRY_BYTES * at, self._shelf.memory.addresses[slot])

    def check(self, owed: int = 0) -> None:
        """When the device has finished and every step was followed, but for `owed` tickets: both sides say the same."""
        lent, ring = self.lent, self.ring.tolist()
        assert self.tail.item() == self._supplied, f"{self.tail.item()} slots are supplied, not {self._supplied}"
        head = self.head.item()
        assert head == self.taken + owed, f"{head} tickets were taken, {self.taken} followed, {owed} owed"
        assert len(set(lent)) == len(lent) <= MOST_SUPPLIED, f"the ring holds {lent}"
        for ticket, slot in enumerate(lent, start=self.taken):
            assert ring[ticket % RING] == self._shelf.memory.addresses[slot], f"ticket {ticket} leads elsewhere"
