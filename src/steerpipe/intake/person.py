"""What one person tends to write: the characters that followed in their own drafts. In memory only, and bounded."""

from collections import OrderedDict

# Characters of a context, the longest first, and the doubt in what followed it: as if so many characters had followed
# as the shipped model has it. Chosen on 20 writers: the second half of an essay after its first, top-1 54.9 → 57.5 %;
# with 2 for all of them 56.7 %.
_DOUBTS = {8: 0.5, 6: 1.0, 5: 2.0, 4: 4.0}
LENGTHS = tuple(_DOUBTS)
_MOST_CONTEXTS = 40_000  # about 12 MB; the contexts that were not met for longest go first
_MOST_CHARACTERS = 20_000  # of one text: a paste of a book is not what a person tends to write


class PersonalModel:
    """Counts of what followed each context of a few characters. `forget` empties it."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[int, ...], dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def learn(self, codes: list[int]) -> None:
        """From a text that was sent, as codes of the alphabet. Drafts that were given up are not learnt."""
        codes = codes[:_MOST_CHARACTERS]
        for at, code in enumerate(codes):
            for length in LENGTHS:
                if at >= length:
                    self._count(tuple(codes[at - length : at]), code)

    def forget(self) -> None:
        self._counts.clear()

    def blend(self, before: tuple[int, ...], likely: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """`likely` with what this person wrote after the longest context that is known. `before`: the last codes."""
        if not self._counts:
            return likely
        for length in LENGTHS:
            followed = self._counts.get(before[-length:]) if len(before) >= length else None
            if followed:
                return _blended(followed, likely, _DOUBTS[length])
        return likely

    def _count(self, context: tuple[int, ...], code: int) -> None:
        followed = self._counts.setdefault(context, {})
        followed[code] = followed.get(code, 0) + 1
        self._counts.move_to_end(context)
        if len(self._counts) > _MOST_CONTEXTS:
            self._counts.popitem(last=False)


def _blended(followed: dict[int, int], likely: list[tuple[int, float]], doubt: float) -> list[tuple[int, float]]:
    total = sum(followed.values()) + doubt
    blended = [(code, (doubt * share + followed.get(code, 0)) / total) for code, share in likely]
    listed = {code for code, _ in likely}
    blended.extend((code, count / total) for code, count in followed.items() if code not in listed)
    return blended
