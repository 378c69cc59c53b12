"""A slot table whose slots lie in pages that can be given away whole, and come back whole.

A page that is away has *reserved* slots: neither owned nor free. To make one, the least valuable experts go, and those
of the page that are worth more move into their slots; so do slots of the page that are lent (`store.lending`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steerpipe.core.ids import ExpertId
from steerpipe.store.lending import LendingTable
from steerpipe.store.policies import Policy
from steerpipe.store.residency import SlotTable, _Held


@dataclass(frozen=True, slots=True)
class Vacated:
    """A page that nobody owns a slot of. `moves`: (from, to) slots, whose bytes the caller copies first of all."""

    page: int
    evicted: tuple[ExpertId, ...]
    moves: tuple[tuple[int, int], ...]
    lent: tuple[tuple[int, int], ...] = ()  # (from, to) of slots that are lent: there are no bytes to copy


class PagedTable(SlotTable):
    """Page p is slots p · `page_slots` and the following ones."""

    def __init__(
        self, experts: Sequence[ExpertId], pages: int, page_slots: int, policy: Policy, transient_limit: int,
        *, lingers: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(experts, pages * page_slots, policy, transient_limit, lingers=lingers)
        self._page_slots = page_slots
        self._away: set[int] = set()

    @property
    def pages(self) -> int:
        return self._slots // self._page_slots

    @property
    def pages_away(self) -> int:
        return len(self._away)

    def give_page(self, now: float) -> Vacated | None:
        """Gives a page away. None: experts on their way or pinned stand in every page, or too few may be evicted."""
        vacated = self.plan_page(now)
        if vacated is not None:
            self.evict(vacated.evicted)
            self.clear_page(vacated)
        return vacated

    def plan_page(self, now: float) -> Vacated | None:
        """What `give_page` would do; nothing is done."""
        victims = self._least(self._page_slots - len(self._free), now)
        if victims is None:
            return None
        going = set(victims)
        staying = {page: [held for held in owners if held.number not in going] for page, owners in self._movable()}
        if not staying:
            return None
        page = min(staying, key=lambda each: (len(staying[each]), -each))
        own = self.slots_of_page(page)
        evicted = tuple(self._experts[number] for number in victims)
        room = [slot for slot in (*self._free, *(self._held[each].slot for each in evicted)) if slot not in own]
        moves = tuple((held.slot, room.pop()) for held in staying[page])
        lent = tuple((slot, room.pop()) for slot in own if slot in self._reserved)
        return Vacated(page, evicted, moves, lent)

    def evict(self, experts: Collection[ExpertId]) -> None:
        """The first half of giving a page: whoever goes."""
        for expert in experts:
            self._release(expert)

    def clear_page(self, vacated: Vacated) -> None:
        """The second half: whoever moves, moves; the page is away."""
        own, after = self.slots_of_page(vacated.page), dict(vacated.moves)
        taken = {*own, *after.values(), *(slot for _, slot in vacated.lent)}
        self._free = [slot for slot in self._free if slot not in taken]
        for held in self._held.values():
            held.slot = after.get(held.slot, held.slot)
        self._away.add(vacated.page)
        self._reserved.update(own, (slot for _, slot in vacated.lent))

    def restore(self, page: int) -> None:
        """A page that was given away is the experts' again, empty."""
        assert page in self._away, f"page {page} was not given away"
        self._away.remove(page)
        own = self.slots_of_page(page)
        self._reserved.difference_update(own)
        self._free.extend(reversed(own))

    def recall(self, page: int) -> None:
        """After an interrupt of whoever gave it: `restore`, if it is away at all."""
        if page in self._away:
            self.restore(page)

    def slots_of_page(self, page: int) -> range:
        return range(page * self._page_slots, (page + 1) * self._page_slots)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._slots_away <= self._reserved, "a page is away in part"

    @property
    def _slots_away(self) -> set[int]:
        return {slot for page in self._away for slot in self.slots_of_page(page)}

    def _least(self, count: int, now: float) -> list[int] | None:
        """Whom the policy misses least, so many; the protected ones only in need. None: there are not as many."""
        if count <= 0:
            return []
        chosen: list[int] = []
        for among in (self._idle & self._exposed, self._idle & ~self._exposed):
            candidates = np.flatnonzero(among)
            if len(chosen) < count and candidates.size:
                chosen += self._policy.victims(candidates, count - len(chosen), now)
        return chosen if len(chosen) == count else None

    def _movable(self) -> Iterator[tuple[int, list[_Held]]]:
        """Pages that are here and hold nothing but experts that may be moved, with those."""
        owners: dict[int, list[_Held]] = {page: [] for page in range(self.pages) if page not in self._away}
        for held in self._held.values():
            owners[held.slot // self._page_slots].append(held)
        for page, those in owners.items():
            if all(held.ready and not held.pins for held in those):
                yield page, those


class PagedLendingTable(PagedTable, LendingTable):
    """Slots in pages, single ones of which are lent as well. `most_away` pages are away at once."""

    def __init__(
        self, experts: Sequence[ExpertId], pages: int, page_slots: int, most_away: int, policy: Policy,
        transient_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(experts, pages, page_slots, policy, transient_limit, lingers=True)
        self._most_away = most_away

    @property
    def reserved(self) -> Collection[int]:
        """Slots that are lent one by one."""
        return self._reserved - self._slots_away

    @property
    def slots_here(self) -> int:
        return self._slots - len(self._away) * self._page_slots

    @property
    def least_slots(self) -> int:
        return self._slots - self._most_away * self._page_slots

    def mend(self, lent: Collection[int]) -> None:
        """See LendingTable. Pages that are away stay there."""
        super().mend({*lent, *self._slots_away})
