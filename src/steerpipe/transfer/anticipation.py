"""Experts for a prompt that is still being typed: behind everything else, in slots of their own. Never waits."""

import math
from collections.abc import Iterable, Sequence

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.queue import Reason


class Anticipation:
    """What is expected, in place of what was expected before."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder

    def expect(self, wanted: Sequence[ExpertId], keep: Iterable[ExpertId]) -> int:
        """Sends for `wanted`, never into the slots of `keep`; neighbours in the file are read together. How many are on
        their way.

        What is on its way for drafts and not among them is cut; what has landed stays.
        """
        ladder = self._ladder
        with ladder.lock:
            ladder.check_usable()
            ladder.withdraw(set(ladder.queue.waiting(Reason.DRAFT)) - set(wanted), Reason.DRAFT)
            ladder.table.protect(keep)
            by_place = sorted(wanted, key=lambda each: ladder.addresses[each].offset)
            return sum(ladder.guess(expert, Reason.DRAFT, math.inf, transient=False) for expert in by_place)

    @property
    def bytes_in_flight(self) -> int:
        ladder = self._ladder
        with ladder.lock:
            return sum(ladder.addresses[each].size_bytes for each in ladder.queue.waiting(Reason.DRAFT))
