"""A text that is edited in place: pieces of some thousand characters, and a memory of where the last edit was.

An edit copies one piece. Finding it walks from the piece of the edit before, so typing costs the same at any length,
and a jump across a million characters passes about 100 pieces: 5 us more.
"""

_FULL = 16_384  # characters: a piece that grows past it is cut; copying one takes a microsecond or two
_NEW = _FULL // 2


class ChunkedText:
    """Positions count characters, and are the caller's to check."""

    def __init__(self) -> None:
        self._pieces: list[str] = [""]  # never empty; none is empty but a lone one
        self._length = 0
        self._index = 0  # the piece that was found last ...
        self._start = 0  # ... and the position of its first character

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        return "".join(self._pieces)

    def insert(self, at: int, text: str) -> None:
        index, start = self._find(at)
        piece = self._pieces[index]
        grown = piece[: at - start] + text + piece[at - start :]
        self._length += len(text)
        if len(grown) <= _FULL:
            self._pieces[index] = grown
        else:
            self._pieces[index : index + 1] = [grown[i : i + _NEW] for i in range(0, len(grown), _NEW)]

    def remove(self, at: int, count: int) -> str:
        """Takes `count` characters out, and gives them back."""
        taken = []
        left = count
        while left:
            index, start = self._find(at)
            piece = self._pieces[index]
            if at - start == len(piece):  # `_find` prefers the end of a piece to the beginning of the next
                self._index, self._start = index + 1, at
                continue
            part = piece[at - start : at - start + left]
            taken.append(part)
            left -= len(part)
            self._length -= len(part)
            self._keep(index, start, piece[: at - start] + piece[at - start + len(part) :])
        return "".join(taken)

    def slice(self, begin: int, end: int) -> str:
        """The characters from `begin` up to `end`; what lies past the end of the text is left out."""
        if begin >= end:
            return ""
        index, start = self._find(begin)
        parts = []
        while start < end and index < len(self._pieces):
            piece = self._pieces[index]
            parts.append(piece[max(0, begin - start) : end - start])
            index, start = index + 1, start + len(piece)
        return "".join(parts)

    def _keep(self, index: int, start: int, piece: str) -> None:
        if piece or len(self._pieces) == 1:
            self._pieces[index] = piece
            return
        del self._pieces[index]
        if index == len(self._pieces):  # the last one is gone: stand on the one before
            self._index, self._start = index - 1, start - len(self._pieces[index - 1])

    def _find(self, at: int) -> tuple[int, int]:
        """The piece with `at` in it or at its end, and where it starts."""
        index, start = self._index, self._start
        while at < start:
            index -= 1
            start -= len(self._pieces[index])
        while at > start + len(self._pieces[index]) and index + 1 < len(self._pieces):
            start += len(self._pieces[index])
            index += 1
        self._index, self._start = index, start
        return index, start
