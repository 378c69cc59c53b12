"""Whose turn was longest ago. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

_MOST = 256  # one that is forgotten is served as if it were new

Who = TypeVar("Who", bound=Hashable)


class Turns(Generic[Who]):
    """Remembers the last 256 who had a turn."""

    def __init__(self) -> None:
        self._taken: dict[Who, int] = {}  # longest ago first
        self._count = 0

    def rank(self, who: Who) -> int:
        """Who has the lowest is next: -1 for one who has had no turn."""
        return self._taken.get(who, -1)

    def take(self, who: Who) -> None:
        self._taken.pop(who, None)
        self._taken[who] = self._count
        self._count += 1
        if len(self._taken) > _MOST:
            self.forget(next(iter(self._taken)))

    def forget(self, who: Who) -> None:
        self._taken.pop(who, None)
