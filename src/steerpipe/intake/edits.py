"""One change of an unfinished text, with its time. Positions count characters (code points), not bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from steerpipe.core.errors import RequestError

_VALID = "positions and counts are 0 or more, text is valid Unicode, and times are numbers of seconds"


class EditKind(StrEnum):
    """How the change came about. An undo is none of its own: it is whatever it does to the text."""

    INSERT = "insert"
    PASTE = "paste"
    DELETE = "delete"
    REPLACE = "replace"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class DraftEdit:
    """At `at`, `removed` characters go and `text` comes; MOVE puts the removed span back at `to`.

    `to` is where the span begins afterwards, so it counts characters of the text without the span. `seconds` is on the
    clock of whoever types; only differences are used.
    """

    kind: EditKind
    at: int
    seconds: float
    removed: int = 0
    text: str = ""
    to: int | None = None

    def __post_init__(self) -> None:
        if self.at < 0 or self.removed < 0 or (self.to is not None and self.to < 0) or self.seconds != self.seconds:
            raise RequestError(f"an edit at {self.at} that removes {self.removed}, at {self.seconds} s", fix=_VALID)
        if not _SHAPES[self.kind](self):
            raise RequestError(f"a {self.kind} that removes {self.removed} characters", fix=_WANTED[self.kind])
        if not self.text.isascii():
            _refuse_half_characters(self.text)


def insert(at: int, text: str, seconds: float) -> DraftEdit:
    return DraftEdit(EditKind.INSERT, at, seconds, text=text)


def paste(at: int, text: str, seconds: float) -> DraftEdit:
    return DraftEdit(EditKind.PASTE, at, seconds, text=text)


def delete(at: int, removed: int, seconds: float) -> DraftEdit:
    return DraftEdit(EditKind.DELETE, at, seconds, removed)


def replace(at: int, removed: int, text: str, seconds: float) -> DraftEdit:
    return DraftEdit(EditKind.REPLACE, at, seconds, removed, text)


def move(at: int, removed: int, to: int, seconds: float) -> DraftEdit:
    return DraftEdit(EditKind.MOVE, at, seconds, removed, to=to)


_SHAPES: dict[EditKind, Callable[[DraftEdit], bool]] = {
    EditKind.INSERT: lambda edit: edit.removed == 0 and edit.to is None,
    EditKind.PASTE: lambda edit: edit.removed == 0 and edit.to is None,
    EditKind.DELETE: lambda edit: not edit.text and edit.to is None,
    EditKind.REPLACE: lambda edit: edit.to is None,
    EditKind.MOVE: lambda edit: not edit.text and edit.to is not None,
}
_WANTED = {
    EditKind.INSERT: "an insert only brings text",
    EditKind.PASTE: "a paste only brings text; over a selection it is a replace",
    EditKind.DELETE: "a delete only removes",
    EditKind.REPLACE: "a replace removes and brings text, and names no place to move to",
    EditKind.MOVE: "a move removes a span and says in `to` where it goes",
}


def _refuse_half_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of an edit is half a character (a lone surrogate)", fix="send valid Unicode"
        ) from error
