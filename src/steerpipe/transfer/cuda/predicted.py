"""What predictors say to a source on a GPU: the same words as to `transfer.source.LadderSource`."""

import weakref
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.cuda.observed import Observed
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.throttle import Throttle


class _Busy:
    """Whoever is interrupted inside leaves the shelf busy: it is mended before anything else begins. Else it is as
    busy afterwards as before: the last layer of a step may have been served.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._before = shelf, False

    def __enter__(self) -> None:
        self._before, self._shelf.busy = self._shelf.busy, True

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._shelf.busy = self._before


class Predicted(Observed):
    """All of it may be said at any time on the engine's thread, also while a step runs. Nothing waits."""

    def __init__(self, shelf: Shelf, close: "weakref.finalize[..., Any]") -> None:
        super().__init__(shelf, close)
        self._throttles: dict[int, Throttle] = {}  # by predictor
        self._busy = _Busy(shelf)

    def prefetch(self, experts: Iterable[ExpertId], reason: Reason, deadline: float) -> int:
        """Sends for experts that may be needed; how many are on their way, or will be when a slot can be had.

        A guess is transient until it is used, so wrong ones never hold more slots than the transient limit, and takes
        no slot of an expert that this step may still use, nor of one that is protected. `deadline` is on
        `time.perf_counter`: what has not arrived by then is cut.
        """
        self._check_open()
        shelf = self._shelf
        coming = shelf.guess((self._number(expert) for expert in experts), reason, deadline)
        if not shelf.busy:  # else the step that runs sends them as its layers pass
            shelf.busy = True
            shelf.pump()
            shelf.busy = False
        return coming

    def expect(self, experts: Sequence[tuple[int, int]]) -> None:
        """See `core.blocks.Guessing`. Replaces what was expected before; `prefetch` has a say of its own."""
        base = self._shelf.base
        with self._busy:
            self._shelf.expect([base[layer] + index for layer, index in experts])

    def attend(self, predictor: int) -> None:
        """See `core.blocks.Guessing`. The first one has the throttle that everything began with."""
        shelf = self._shelf
        if not self._throttles:
            self._throttles[predictor] = shelf.throttle
        own = self._throttles.setdefault(predictor, Throttle())
        if own is not shelf.throttle:
            shelf.lose_sight()  # what another one has sent is not this one's
        shelf.throttle = own

    @property
    def idle(self) -> bool:
        """See `core.blocks.Guessing`."""
        return not self._shelf.moving and not self._shelf.asked

    @property
    def throttled(self) -> bool:
        """Whether what is expected is not sent any more: too few of the last guesses were used."""
        return self._shelf.throttle.closed

    def pump(self) -> None:
        """See `core.blocks.Guessing`: while a step runs, which has opened the source."""
        with self._busy:
            if not self._shelf.pump():
                self._shelf.make_room()

    def send_last(self) -> None:
        """See `core.blocks.Guessing`."""
        with self._busy:
            self._shelf.send_last()

    def cancel_prefetches(self, experts: Collection[ExpertId], reason: Reason = Reason.PREFETCH) -> None:
        """Cuts what is still on its way for that reason or a lesser one. What is demanded by now goes on."""
        self._check_open()
        self._shelf.withdraw([self._number(expert) for expert in experts], reason)

    def protect(self, experts: Iterable[ExpertId]) -> None:
        """What is wanted soon: prefetches never evict it, demand only in need. Replaces what was said before."""
        self._check_open()
        self._shelf.table.protect(experts)

    def _number(self, expert: ExpertId) -> int:
        return self._shelf.base[expert.layer] + expert.expert
