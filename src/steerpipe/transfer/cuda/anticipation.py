"""Experts for a prompt that is still being typed, on a GPU: the words of `transfer.anticipation`. Never waits."""

from collections.abc import Callable, Iterable, Sequence

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason


class CudaAnticipation:
    """What is expected, in place of what was expected before. Engine's thread, between steps.

    Copies from pinned memory cannot be taken back once they are queued, so whoever asks wants a few at a time; what has
    to be read first is copied when somebody looks, and cut when it is not expected any more.
    """

    def __init__(self, shelf: Shelf, enter: Callable[[], None]) -> None:
        """`enter`: before anything begins, as every other word to the source does."""
        self._shelf = shelf
        self._enter = enter
        self._copied: Mark | None = None  # behind the last copies
        self._copied_bytes = 0

    def expect(self, wanted: Sequence[ExpertId], keep: Iterable[ExpertId]) -> int:
        """Sends for `wanted`, never into the slots of `keep`; neighbours are copied together. How many are on their
        way.
        """
        self._enter()
        shelf = self._shelf
        numbers = {shelf.base[expert.layer] + expert.expert for expert in wanted}
        for number in set(self._reading()) - numbers:
            if not shelf.table.pins(shelf.experts[number]):
                shelf.cut(number)
        shelf.table.protect(keep)
        absent = [each for each in numbers if shelf.table.state(shelf.experts[each]) is Residency.ABSENT]
        shelf.busy = True
        coming = shelf.send(sorted(absent, key=shelf.order), transient=False, reason=Reason.DRAFT)
        shelf.busy = False
        self._note([number for number in coming if number not in shelf.loading])
        return len({*coming, *(numbers & shelf.loading.keys())})

    @property
    def bytes_in_flight(self) -> int:
        """Looks what has been read meanwhile, and queues its copies."""
        shelf, reading = self._shelf, self._reading()
        if reading and not shelf.busy:
            shelf.busy = True
            shelf.land(wait=False)
            shelf.busy = False
            self._note([number for number in reading if shelf.here[number]])
        if self._copied is not None and shelf.copier.passed(self._copied):
            self._copied, self._copied_bytes = None, 0
        return self._copied_bytes + sum(map(shelf.size_of, self._reading()))

    def _reading(self) -> list[int]:
        """Who is being read for drafts."""
        return [number for number, reason in self._shelf.loading.items() if reason is Reason.DRAFT]

    def _note(self, copied: Sequence[int]) -> None:
        """Their copies have just been queued."""
        if copied:
            self._copied = self._shelf.copier.copied()
            self._copied_bytes += sum(map(self._shelf.size_of, copied))
