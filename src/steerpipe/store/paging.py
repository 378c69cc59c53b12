"""A slot table whose slots lie in pages that can be given away whole, and come back whole.

A page that is away has *reserved* slots: neither owned nor free. To make one, the least valuable experts go, and those
of the page that are worth more move into their slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Policy
from steerpipe.store.residency import SlotTable, _Held


@dataclass(frozen=True, slots=True)
class Vacated:
    """A page that nobody owns a slot of. `moves`: (from, to) slots, whose bytes the caller copies first of all."""

    page: int
    evicted: tuple[ExpertId, ...]
    moves: tuple[tuple[int, int], ...]


class PagedTable(SlotTable):
    """Page p is slots p · `page_slots` and the following ones."""

    def __init__(
        self, experts: Sequence[ExpertId], pages: int, page_slots: int, policy: Policy, transient_limit: int
    ) -> None:
        super().__init__(experts, pages * page_slots, policy, transient_limit)
        self._page_slots = page_slots
        self._away: set[int] = set()

    @property
    def pages(self) -> int:
        return self._slots // self._page_slots

    @property
    def pages_away(self) -> int:
        return len(self._away)

    def vacate(self, now: float) -> Vacated | None:
        """Gives a page away. None: experts on their way or pinned stand in every page, or too few may be evicted."""
        victims = self._least(self._page_slots - len(self._free), now)
        if victims is None:
            return None
        going = set(victims)
        staying = {page: [held for held in owners if held.number not in going] for page, owners in self._movable()}
        if not staying:
            return None
        page = min(staying, key=lambda each: (len(staying[each]), -each))
        evicted = tuple(self._experts[number] for number in victims)
        for expert in evicted:
            self._release(expert)
        return Vacated(page, evicted, self._clear(page, staying[page]))

    def restore(self, page: int) -> None:
        """A page that was given away is the experts' again, empty."""
        assert page in self._away, f"page {page} was not given away"
        self._away.remove(page)
        own = self._slots_of(page)
        self._reserved.difference_update(own)
        self._free.extend(reversed(own))

    def check_integrity(self) -> None:
        super().check_integrity()
        away = {slot for page in self._away for slot in self._slots_of(page)}
        assert away == self._reserved, "a page is away in part"

    def _slots_of(self, page: int) -> range:
        return range(page * self._page_slots, (page + 1) * self._page_slots)

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

    def _clear(self, page: int, staying: Sequence[_Held]) -> tuple[tuple[int, int], ...]:
        """Whoever stays gets a free slot elsewhere; the page is away."""
        own = self._slots_of(page)
        self._free = [slot for slot in self._free if slot not in own]
        moves = []
        for held in staying:
            before, held.slot = held.slot, self._free.pop()
            moves.append((before, held.slot))
        self._away.add(page)
        self._reserved.update(own)
        return tuple(moves)
