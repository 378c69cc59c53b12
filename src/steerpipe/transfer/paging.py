"""Pages of the slot arena, lent to keys and values: the ladder's side of shared memory."""

from torch import Tensor

from steerpipe.core.pages import PageCounts, PageShape
from steerpipe.store.paging import PagedTable, Vacated
from steerpipe.store.slots import SlotArena
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.queue import Reason


class PageLender:
    """Hands pages out and takes them back, whole. Only while no lease is open: between two steps, or before one."""

    def __init__(self, ladder: Ladder, table: PagedTable, arena: SlotArena, shape: PageShape) -> None:
        self.shape = shape
        self._ladder = ladder
        self._table = table
        self._arena = arena
        self._taken = self._returned = self._moved = 0

    def take(self) -> tuple[int, Tensor]:
        """A page's number and its memory (uint8, as it was left), until `give_back`.

        Waits only where something is on its way into every page: guesses are cut, which takes one chunk of a read.
        """
        ladder = self._ladder
        with ladder.lock:
            vacated = self._vacate()
            for expert in vacated.evicted:
                ladder.evicted(expert)
            for before, after in vacated.moves:
                self._arena.copy(before, after)
            self._taken += 1
            self._moved += len(vacated.moves)
        return vacated.page, self._arena.page(vacated.page)

    def give_back(self, page: int) -> None:
        with self._ladder.lock:
            self._table.restore(page)
            self._returned += 1
            self._ladder.changed.notify_all()

    def counts(self) -> PageCounts:
        with self._ladder.lock:
            away = self._table.pages_away
            return PageCounts(self._table.pages - away, away, self._taken, self._returned, self._moved)

    def _vacate(self) -> Vacated:
        ladder = self._ladder
        while True:
            ladder.check_usable()
            vacated = self._table.give_page(ladder.now)
            if vacated is not None:
                return vacated
            assert ladder.moving, "a page is wanted while a lease is open"
            ladder.withdraw(
                [*ladder.queue.waiting(Reason.PREFETCH), *ladder.queue.waiting(Reason.DRAFT)], Reason.PREFETCH
            )
            if ladder.moving:
                ladder.hungry += 1  # nobody guesses meanwhile
                try:
                    ladder.changed.wait()
                finally:
                    ladder.hungry -= 1
