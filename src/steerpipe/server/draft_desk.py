"""Drafts in the engine's process: what is typed comes in, warmth goes out, background work runs in between."""

import time
from collections.abc import Iterator
from contextlib import suppress

from steerpipe.core.errors import RequestError
from steerpipe.core.ids import SequenceId
from steerpipe.engine.request import Opening, Promise, Request
from steerpipe.intake.edits import DraftEdit
from steerpipe.runtime.draft_session import DraftId
from steerpipe.runtime.drafts import Warmth
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.server.messages import Begun, CloseDraft, DraftName, EditDraft, OpenDraft, Warmed

_NEWS_SECONDS = 0.1  # at least between two words about the same drafts


class DraftDesk:
    """On the engine's thread. Text arrives checked: what the template or the context refuses is refused at Enter."""

    def __init__(self, pipe: Pipeline) -> None:
        self._engine = pipe.engine
        self._drafts = pipe.drafts()
        self._ids: dict[DraftName, DraftId] = {}
        self._told: dict[DraftName, Warmth] = {}
        self._begun: dict[DraftName, Opening] = {}  # as far as it was told
        self._typed: dict[DraftName, list[DraftEdit]] = {}  # what came, and has not been looked at; first come first
        self._stirred = False  # something may have changed since the last news
        self._last = 0.0  # when they were told

    def obey(self, message: OpenDraft | EditDraft | CloseDraft) -> None:
        self._stirred = True
        own = self._ids.get(message.name)
        if isinstance(message, OpenDraft):
            with suppress(RequestError):  # Enter will tell
                self._ids[message.name] = self._drafts.open(
                    message.scope, message.messages, settings=message.settings, batched=message.batched
                )
        elif own is None:
            return  # of an engine that is gone
        elif isinstance(message, EditDraft):
            self._typed.setdefault(message.name, []).extend(message.edits)
        else:
            self._forget(message.name)
            self._drafts.close(own)

    def submit(self, name: DraftName, request: Request, promise: Promise | None) -> SequenceId:
        """Enter. `request` is the whole of it, encoded by the server. Raises RequestError."""
        own = self._ids.get(name)
        if own is None:
            return self._engine.submit(request, promise)
        self._drafts.edit(own, self._typed.pop(name, ()))
        self._forget(name)
        try:
            return self._drafts.submit(own, request=request, promise=promise)
        except RequestError:
            self._drafts.close(own)
            raise

    def tend(self) -> None:
        """Between steps: looks at what was typed in one draft, and gives the engine background work, if there is any.

        However much one types, it is one look for each step of the engine.
        """
        name = next(iter(self._typed), None)
        if name is not None:
            self._drafts.edit(self._ids[name], self._typed.pop(name))
        if self._ids:
            self._drafts.tend(time.monotonic())

    def patience(self) -> float | None:
        """For how many seconds an idle engine may wait for messages; None: for ever."""
        if self._typed:
            return 0.0
        wakes = [self._drafts.next_wake(), self._last + _NEWS_SECONDS if self._stirred else None]
        times = [wake for wake in wakes if wake is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def stepped(self) -> Iterator[Begun]:
        """The engine has computed something, perhaps for a draft: how an answer begins that it works at ahead, where
        more is known of it than was told.
        """
        self._stirred = self._stirred or bool(self._ids)
        served = self._drafts.served
        opening = None if served is None else self._drafts.opening(served)
        if opening is None:
            return
        for name, own in self._ids.items():
            if own == served and opening != self._begun.get(name):
                self._begun[name] = opening
                yield Begun(name, opening)

    def news(self) -> Iterator[Warmed]:
        """Of drafts whose warmth is another than was told, ten times a second at most."""
        now = time.monotonic()
        if not self._stirred or now < self._last + _NEWS_SECONDS:
            return
        self._stirred, self._last = False, now
        for name, own in self._ids.items():
            warmth = self._drafts.warmth(own)
            if warmth != self._told.get(name):
                self._told[name] = warmth
                yield Warmed(name, warmth)

    def _forget(self, name: DraftName) -> None:
        del self._ids[name]
        self._told.pop(name, None)
        self._begun.pop(name, None)
        self._typed.pop(name, None)
