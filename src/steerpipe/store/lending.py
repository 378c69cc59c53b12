"""A slot table that lends slots: a device fills them by itself, and says afterwards with whose block.

A *reserved* slot has no owner. It is taken like any other, free or a victim's, and either adopted by the expert whose
block it holds or given back.
"""

from collections.abc import Collection
from itertools import islice

import numpy as np

from steerpipe.store.numbered import NumberedTable
from steerpipe.store.residency import Placement, Residency, _Held


class LendingTable(NumberedTable):
    """Numbers are the experts'. `adopt` and `give_back` may be called again for what they have done already."""

    @property
    def reserved(self) -> Collection[int]:
        """Slots that are lent. A view."""
        return self._reserved

    @property
    def slots_here(self) -> int:
        """How many there are now for experts and for lending."""
        return self._slots

    @property
    def least_slots(self) -> int:
        """How many there always are."""
        return self._slots

    def reserve(self, now: float, sparing: Collection[int] = ()) -> Placement | None:
        """A slot without an owner: a free one, else the victim's that `begin` would take. None: there is none now."""
        evicted = None
        if not self._free:
            evicted = self._choose(now, sparing, only_transient=False, strict=False)
            if evicted is None:
                return None
            self._release(evicted)
        slot = self._free[-1]
        self._reserved.add(slot)
        del self._free[-1]
        return Placement(slot, evicted)

    def vacate(self, count: int, now: float, below: int, sparing: Collection[int]) -> list[Placement]:
        """Evicts until `count` slots are free, experts with numbers under `below` alone: what lingers, then by policy.

        Never what is protected or spared.
        """
        wanted = count - len(self._free)
        lingering = (each for each in self._lingering if each < below and self._exposed[each] and each not in sparing)
        going = list(islice(lingering, wanted))
        if len(going) < wanted:
            candidates = np.flatnonzero(self._idle & self._exposed & ~self._passing)
            next_ones = self._policy.victims(candidates, 2 * count, now) if candidates.size else []
            going += [each for each in next_ones if each < below and each not in sparing][: wanted - len(going)]
        places = []
        for expert in [self._experts[number] for number in going]:
            places.append(Placement(self._held[expert].slot, expert))
            self._release(expert)
        return places

    def adopt(self, number: int, slot: int) -> None:
        """ABSENT → READY in a reserved slot, and kept. It does not replace a nominee: what just came is spared."""
        expert = self._experts[number]
        mine = self.state(expert) is Residency.READY and self._held[expert].slot == slot
        assert mine or slot in self._reserved, f"slot {slot} is not lent"
        assert mine or self.state(expert) is Residency.ABSENT, f"{expert} has a slot already"
        if not mine:
            self._held[expert] = _Held(number, slot, transient=False, ready=True)
        self._idle[number] = self._held[expert].pins == 0
        self._reserved.discard(slot)

    def give_back(self, slot: int) -> None:
        """A reserved slot is free again."""
        if slot in self._reserved:
            self._reserved.discard(slot)
            self._free.append(slot)

    def mend(self, lent: Collection[int]) -> None:
        """After an interrupt in any call: who has a slot keeps it, unpinned, `lent` are reserved, the others free."""
        owners = {held.slot for held in self._held.values()}
        self._reserved = set(lent) - owners
        self._free = [slot for slot in reversed(range(self._slots)) if slot not in owners | self._reserved]
        self._transients = sum(held.transient for held in self._held.values())
        self._idle[:] = self._passing[:] = False
        for held in self._held.values():
            held.pins = 0
            self._idle[held.number] = held.ready
            self._passing[held.number] = held.transient
        lingering = np.flatnonzero(self._idle & self._passing).tolist() if self._lingers else []
        known = set(lingering)
        self._lingering = dict.fromkeys([*(each for each in self._lingering if each in known), *lingering])
        self._nominees.clear()
