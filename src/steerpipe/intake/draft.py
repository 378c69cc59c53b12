"""An unfinished text as its edits make it. It keeps the text and no history: what was deleted is forgotten."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from steerpipe.core.errors import RequestError
from steerpipe.intake.chunks import ChunkedText
from steerpipe.intake.edits import DraftEdit, EditKind


class TypedText(Protocol):
    """What others read of a draft."""

    def __len__(self) -> int: ...

    def slice(self, begin: int, end: int) -> str:
        """The characters from `begin` up to `end`, as many as there are."""
        ...


@dataclass(frozen=True, slots=True)
class DraftChange:
    """What one edit did. Characters before `changed_at` are as they were; `length` counts all of them now."""

    version: int
    changed_at: int
    length: int


class Draft:
    """The text of one unfinished prompt. Version 0 is the empty text; each edit makes the next.

    Memory is in proportion to the text, not to the edits: what was typed and deleted again leaves nothing.
    """

    def __init__(self) -> None:
        self._text = ChunkedText()
        self.version = 0
        self.changed_seconds: float | None = None  # of the latest edit
        # Per entry (version, position): nothing before that position has changed since. Positions ascend, so there
        # are never more entries than characters.
        self._floors: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._text)

    @property
    def text(self) -> str:
        return str(self._text)

    def slice(self, begin: int, end: int) -> str:
        """The characters from `begin` up to `end`, as many as there are."""
        return self._text.slice(begin, end)

    def apply(self, edit: DraftEdit) -> DraftChange:
        """Does one edit. Raises RequestError, and changes nothing, if it lies outside the text."""
        self._check(edit)
        removed = self._text.remove(edit.at, edit.removed) if edit.removed else ""
        changed_at = edit.at
        if edit.to is not None:
            self._text.insert(edit.to, removed)
            changed_at = min(edit.at, edit.to)
        elif edit.text:
            self._text.insert(edit.at, edit.text)
        self.version += 1
        self.changed_seconds = edit.seconds
        while self._floors and self._floors[-1][1] >= changed_at:
            self._floors.pop()
        self._floors.append((self.version, changed_at))
        return DraftChange(self.version, changed_at, len(self._text))

    def unchanged_since(self, version: int) -> int:
        """How many of the first characters are still as they were in `version`; one that lagged behind asks this."""
        assert 0 <= version <= self.version, f"version {version} of a draft that is at {self.version}"
        first = bisect_right(self._floors, version, key=lambda floor: floor[0])
        return self._floors[first][1] if first < len(self._floors) else len(self._text)

    def _check(self, edit: DraftEdit) -> None:
        end = edit.at + edit.removed
        room = len(self._text) - edit.removed
        if end > len(self._text) or (edit.kind is EditKind.MOVE and edit.to is not None and edit.to > room):
            raise RequestError(
                f"a {edit.kind} of characters {edit.at} to {end}"
                + (f", to {edit.to}," if edit.to is not None else "")
                + f" in a draft of {len(self._text)}",
                fix="count characters of the text as the edits before have left it",
            )
