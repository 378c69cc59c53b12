"""Whose draft is next: scopes take turns, and so do the drafts of one scope."""

from steerpipe.engine.turns import Turns
from steerpipe.runtime.draft_session import DraftId, DraftSession


class DraftTurns:
    """Of one kind of work."""

    def __init__(self) -> None:
        self._scopes: Turns[str] = Turns()
        self._drafts: Turns[DraftId] = Turns()

    def rank(self, draft: DraftSession) -> tuple[int, int]:
        """Who has the lowest is next."""
        return self._scopes.rank(draft.scope), self._drafts.rank(draft.id)

    def take(self, draft: DraftSession) -> None:
        self._scopes.take(draft.scope)
        self._drafts.take(draft.id)
