"""Drafts for whom there is no room beside others: they wait, and do not ask again before something has changed."""

from steerpipe.model.kv_cache import KvPool
from steerpipe.runtime.draft_session import DraftId, DraftSession


class DraftCrowd:
    """Those that wait. Engine's thread."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._waiting: dict[DraftId, DraftSession] = {}
        self._full_blocks = 0  # in use when there was no room

    def add(self, draft: DraftSession) -> None:
        self._waiting[draft.id], self._full_blocks = draft, self._pool.live_blocks

    @property
    def hopeful(self) -> bool:
        """Whether somebody waits, and somebody has given blocks back."""
        return bool(self._waiting) and self._pool.live_blocks < self._full_blocks

    def called(self, ended: DraftSession | None = None) -> dict[DraftId, DraftSession]:
        """Those that may ask again, because blocks came back or a draft has `ended`."""
        if ended is not None:
            self._waiting.pop(ended.id, None)
        elif not self.hopeful:
            return {}
        called, self._waiting = self._waiting, {}
        return called
