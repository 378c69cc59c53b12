"""The 128 codes of the character model: ASCII, some common characters beyond it, and three that are no characters."""

from functools import cached_property

OTHER = 0  # every character without a code
START = 1  # before the first character of a text
END = 2  # Enter: the text is sent
SIZE = 128
_PLAIN = "\n\t" + "".join(map(chr, range(32, 127)))
_FIRST = 3


class Alphabet:
    """`beyond`: characters outside ASCII that have codes of their own, at most 28."""

    def __init__(self, beyond: str) -> None:
        assert len(beyond) <= SIZE - _FIRST - len(_PLAIN), f"{len(beyond)} characters beyond ASCII"
        self.beyond = beyond
        self.characters = "\ufffd\ufffd\ufffd" + _PLAIN + beyond  # by code; the first three have none

    @cached_property
    def codes(self) -> dict[str, int]:
        return {character: code for code, character in enumerate(self.characters) if code >= _FIRST}

    def encode(self, text: str) -> list[int]:
        codes = self.codes
        return [codes.get(character, OTHER) for character in text]
