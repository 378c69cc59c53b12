"""All drafts that are open, as the server knows them: who has how many, and who must hear what. On the event loop."""

import itertools
from typing import Protocol

from steerpipe.engine.request import Opening
from steerpipe.intake.edits import DraftEdit
from steerpipe.runtime.drafts import Warmth
from steerpipe.server.engine_link import EngineLink
from steerpipe.server.faults import ApiError
from steerpipe.server.messages import Begun, CloseDraft, DraftName, EditDraft, OpenDraft, Warmed

MOST_DRAFTS = 256
MOST_OF_ONE = 32  # drafts of one user; one more supersedes the one that was opened first


class Typist(Protocol):
    """Whoever types a draft."""

    scope: str

    def opening(self, name: DraftName) -> OpenDraft: ...

    def whole(self) -> DraftEdit | None:
        """The text as one edit of the empty text; None: it is empty."""
        ...

    def warmed(self, warmth: Warmth) -> None: ...

    def begun(self, opening: Opening) -> None:
        """So the answer begins to what stood there a moment ago."""
        ...

    def superseded(self) -> None:
        """The draft is closed, because the same user has opened too many others."""
        ...


class DraftRoom:
    """Drafts outlive the engine: the next one is told what stands there."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._open: dict[DraftName, Typist] = {}  # oldest first
        self._names = itertools.count()
        link.on_ready, link.on_warmed, link.on_begun = self._tell_all, self._warmed, self._begun

    def __len__(self) -> int:
        return len(self._open)

    def open(self, typist: Typist) -> DraftName:
        """Raises ApiError."""
        own = [name for name, each in self._open.items() if each.scope == typist.scope]
        if len(own) >= MOST_OF_ONE:
            first = self._open[own[0]]
            self.close(own[0])
            first.superseded()
        elif len(self._open) >= MOST_DRAFTS:
            raise ApiError(429, f"{MOST_DRAFTS} drafts are open; try again later", retry_after_seconds=5)
        name = DraftName(next(self._names))
        self._open[name] = typist
        self._tell(name)
        return name

    def edit(self, name: DraftName, edits: tuple[DraftEdit, ...]) -> None:
        self._link.tell(EditDraft(name, edits))

    def close(self, name: DraftName) -> None:
        """Twice is once."""
        if self._open.pop(name, None) is not None:
            self._link.tell(CloseDraft(name))

    def submitted(self, name: DraftName) -> None:
        """The draft has become a request."""
        del self._open[name]

    def _tell(self, name: DraftName) -> None:
        typist = self._open[name]
        self._link.tell(typist.opening(name))
        whole = typist.whole()
        if whole is not None:
            self.edit(name, (whole,))

    def _tell_all(self) -> None:
        for name in self._open:
            self._tell(name)

    def _warmed(self, message: Warmed) -> None:
        typist = self._open.get(message.name)
        if typist is not None:
            typist.warmed(message.warmth)

    def _begun(self, message: Begun) -> None:
        typist = self._open.get(message.name)
        if typist is not None:
            typist.begun(message.opening)
