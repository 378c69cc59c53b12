"""Drafts for whom there is no room beside others: they wait, and ask again one by one when something changed."""

from steerpipe.model.kv_cache import KvPool
from steerpipe.runtime.draft_session import DraftId, DraftSession


class DraftCrowd:
    """Those that wait, first come, first asked. Engine's thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._waiting: dict[DraftId, DraftSession] = {}  # longest first
        self._full_blocks = 0  # in use when there was no room for the first
        self._stirred = False  # a draft or an answer has ended since

    def add(self, draft: DraftSession) -> None:
        """There was no room for it. If it is the first, nobody asks before something changes."""
        self._waiting.setdefault(draft.id, draft)
        if draft is self._first:
            self._full_blocks, self._stirred = self._pool.live_blocks, False

    def leave(self, draft: DraftSession) -> None:
        """It has what it waited for, or wants nothing any more."""
        self._waiting.pop(draft.id, None)

    def stir(self) -> None:
        """A draft or an answer has ended: others may drop what is left of it."""
        self._stirred = True

    def called(self) -> dict[DraftId, DraftSession]:
        """The first, if it may ask again because blocks came back or somebody has ended."""
        hopeful = self._stirred or self._pool.live_blocks < self._full_blocks
        first = self._first
        return {first.id: first} if first is not None and hopeful else {}

    @property
    def _first(self) -> DraftSession | None:
        return next(iter(self._waiting.values()), None)
