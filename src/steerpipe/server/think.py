"""Splits an answer into what the model thought and what it says. Pure: text in, text out."""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str = ""
    content: str = ""


class ThinkSplitter:
    """Pieces in, pieces out; a tag that is split between pieces is not seen by anybody.

    Thinking is what stands between `<think>` at the very beginning and `</think>`; elsewhere the tags are text.
    `inside`: the prompt has opened it already, as some chat templates do.
    The line breaks after either tag belong to the tag.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._held = ""
        self._thinks: bool | None = True if inside else None  # None: not decided yet
        self._trims = inside  # line breaks that come next belong to a tag

    @property
    def thinks(self) -> bool:
        """Whether what came last was thought rather than said."""
        return bool(self._thinks)

    def push(self, piece: str) -> Split:
        text = self._held + piece
        self._held = ""
        if self._thinks is None:
            start = text.lstrip()
            if len(start) < len(OPEN) and OPEN.startswith(start):
                self._held = text
                return Split()
            self._thinks = start.startswith(OPEN)
            self._trims = self._thinks
            text = start.removeprefix(OPEN) if self._thinks else text
        return self._think(text) if self._thinks else Split(content=self._trimmed(text))

    def finish(self) -> Split:
        """What was held back: the beginning of a tag that never came to its end."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self._thinks else Split(content=held)

    def _think(self, text: str) -> Split:
        at = text.find(CLOSE)
        if at >= 0:
            self._thinks = False
            thought = self._trimmed(text[:at]).rstrip("\n")
            self._trims = True
            return Split(thought, self._trimmed(text[at + len(CLOSE) :]))
        free = len(text) - _overlap(text)
        self._held = text[free:]
        return Split(reasoning=self._trimmed(text[:free]))

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text


def _overlap(text: str) -> int:
    """Length of the longest end of `text`, line breaks before it included, that the closing tag may begin with."""
    size = next((n for n in range(min(len(text), len(CLOSE) - 1), 0, -1) if text.endswith(CLOSE[:n])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip("\n"))
