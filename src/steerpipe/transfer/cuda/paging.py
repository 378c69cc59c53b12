"""Pages of the device's slots, lent to keys and values: a source's side of shared memory on a GPU.

A page is taken seldom (once in 128 tokens of a sequence at most), so the simplest order is quick enough: the device is
waited for, and with nobody computing or copying the page's experts make way.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.core.pages import PageCounts, PagePlan, PageShape
from steerpipe.store.lending import LendingTable
from steerpipe.store.paging import PagedLendingTable, Vacated
from steerpipe.store.policies import Policy
from steerpipe.transfer.cuda.ahead import LayerAhead
from steerpipe.transfer.cuda.landing import SlotRing
from steerpipe.transfer.cuda.serving import Server
from steerpipe.transfer.cuda.shelf import Shelf


def make_table(
    experts: Sequence[ExpertId], slots: int, policy: Policy, transient_limit: int, plan: PagePlan | None
) -> LendingTable:  # fmt: skip
    """With a plan the slots lie in its pages."""
    if plan is None:
        return LendingTable(experts, slots, policy, transient_limit, lingers=True)
    return PagedLendingTable(experts, plan.pages, plan.shape.slots, plan.kv_pages, policy, transient_limit)


class CudaPages:
    """Hands pages out and takes them back, whole. Engine thread, between two steps."""

    def __init__(
        self, shelf: Shelf, shape: PageShape, ahead: LayerAhead, server: Server, landing: SlotRing | None,
        closing: "weakref.finalize[..., Any]",
    ) -> None:  # fmt: skip
        """`closing`: of the source that all this belongs to."""
        assert isinstance(shelf.table, PagedLendingTable), "the slots lie in pages"
        self.shape = shape
        self._shelf, self._table = shelf, shelf.table
        self._ahead, self._server, self._landing, self._closing = ahead, server, landing, closing
        self._taken = self._returned = self._moved = 0

    def take(self) -> tuple[int, Tensor]:
        """A page's number and its memory (uint8, as it was left), until `give_back`. Waits for the device.

        An interrupt finds every expert whole: victims are gone before their slots are written, and those that move
        are marked as not there until their bytes are.
        """
        self._enter()
        shelf = self._shelf
        shelf.busy = True
        vacated = self._find()
        shelf.copier.drain()  # nobody reads a slot, and nothing comes into one
        self._evict(vacated)
        for before, after in vacated.moves:
            shelf.memory.move(before, after)
        shelf.copier.drain()
        try:
            self._move(vacated)
            shelf.copier.drain()  # whatever comes next finds the table as it is
        except BaseException:
            self._table.recall(vacated.page)
            raise
        shelf.busy = False
        self._taken += 1
        self._moved += len(vacated.moves)
        return vacated.page, shelf.memory.page(vacated.page)

    def give_back(self, page: int) -> None:
        """Who is copied there waits for the kernels that may still read keys and values."""
        mark = self._shelf.copier.computed()
        for slot in self._table.slots_of_page(page):
            self._shelf.readers[slot] = mark
        self._table.restore(page)
        self._returned += 1

    def counts(self) -> PageCounts:
        away = self._table.pages_away
        return PageCounts(self._table.pages - away, away, self._taken, self._returned, self._moved)

    def _enter(self) -> None:
        """What an interrupt left half done is mended now."""
        if not self._closing.alive:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")
        if self._shelf.busy:
            self._server.release()
            if self._landing is not None:
                self._landing.restore()

    def _find(self) -> Vacated:
        """At the cost of guesses under way, where something is on its way to every page."""
        shelf = self._shelf
        if self._landing is not None:
            self._landing.drop_guesses()
        vacated = self._table.plan_page(shelf.now)
        if vacated is None:
            self._ahead.drop(set())
            for number in [*shelf.moving, *shelf.loading]:
                shelf.cut(number)
            vacated = self._table.plan_page(shelf.now)
        assert vacated is not None, "a page is wanted while a lease is open, or more than the plan has for keys"
        return vacated

    def _evict(self, vacated: Vacated) -> None:
        shelf = self._shelf
        for number in (shelf.base[expert.layer] + expert.expert for expert in vacated.evicted):
            shelf.here[number] = 0
            shelf.copier.write(shelf.memory.entries[number], shelf.memory.absent[number])
            shelf.guessed.pop(number, None)
        self._table.evict(vacated.evicted)
        shelf.tally.evictions += len(vacated.evicted)

    def _move(self, vacated: Vacated) -> None:
        """The bytes are there: the table, the entries and the rings follow."""
        shelf = self._shelf
        moves = {**dict(vacated.moves), **dict(vacated.lent)}
        numbers = self._numbers(moves)
        for number in numbers.values():
            shelf.here[number] = 0
        self._table.clear_page(vacated)
        if self._landing is not None:
            self._landing.relocate(moves)
        for slot, number in numbers.items():
            shelf.copier.write(shelf.memory.entries[number], shelf.memory.addresses[moves[slot]])
            shelf.here[number] = 1
        for slot in (*moves.values(), *self._table.slots_of_page(vacated.page)):
            shelf.arrivals[slot] = shelf.readers[slot] = None

    def _numbers(self, slots: Collection[int]) -> dict[int, int]:
        """Whose they are, of those that somebody owns."""
        shelf = self._shelf
        here = [number for number, there in enumerate(shelf.here) if there]
        owned = zip(shelf.table.slots_of(here), here, strict=True)
        return {slot: number for slot, number in owned if slot in slots}
