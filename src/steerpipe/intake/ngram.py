"""A character model with back-off: which character comes next, and how likely.

n-grams lie in levels, level k holding those of k characters, sorted by (parent, last character), so that what follows
an n-gram is one run of the next level. p(c | h) is what the longest n-gram `hc` that is held says, times the back-off
weights of the longer contexts that do not hold c. Probabilities and weights are bytes: sixteenths of a bit.
"""

import zipfile
from array import array
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steerpipe.core.errors import InputError
from steerpipe.intake.alphabet import SIZE, START, Alphabet

STEPS = 16  # per bit: 4 % of a probability
WEIGHT_ONE = 32  # the byte of a weight of 1; it may be up to 4
_ENOUGH = 0.03  # of the probability: what only shorter contexts know, together, is not worth listing
ASSET = Path(__file__).parent.parent / "assets" / "ngram.npz"
PROBABILITIES: list[float] = [2.0 ** (-byte / STEPS) for byte in range(256)]
WEIGHTS: list[float] = [2.0 ** ((WEIGHT_ONE - byte) / STEPS) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class NgramLevel:
    """`first[i]` up to `first[i + 1]` are the n-grams of the next level that begin with number i."""

    characters: bytes
    probabilities: bytes
    weights: bytes
    first: "array[int]"


class Context(NamedTuple):
    """What the model knows of the text so far: (level, number) of the n-grams that end it, the longest first."""

    runs: tuple[tuple[int, int], ...]


class CharacterModel:
    """Immutable. A lookup takes microseconds; nothing of the text that it is asked about is kept."""

    def __init__(self, alphabet: Alphabet, levels: list[NgramLevel]) -> None:
        self.alphabet = alphabet
        self._levels = levels

    @property
    def order(self) -> int:
        """Characters of the longest n-gram: the next character depends on at most one fewer."""
        return len(self._levels)

    @property
    def ngrams(self) -> int:
        return sum(len(level.characters) for level in self._levels)

    @classmethod
    def load(cls, file: Path = ASSET) -> "CharacterModel":
        """Reads a file of `recipes.ngram`. Takes tens of milliseconds. Raises InputError."""
        try:
            with np.load(BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
                alphabet = Alphabet("".join(map(chr, arrays["beyond"].tolist())))
                levels = [_read_level(arrays, k) for k in range(int(arrays["levels"]))]
            _check_sizes(levels)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{file} is no character model: {error}",
                fix="reinstall steerpipe, or make one: python -m recipes.ngram",
            ) from error
        return cls(alphabet, levels)

    def context(self, text: str) -> Context:
        """After `text`, which begins where a person began to type."""
        known = self.order - 1
        begin = Context(((0, START),)) if len(text) < known else Context(())
        for code in self.alphabet.encode(text[-known:]):
            begin = self.follow(begin, code)
        return begin

    def follow(self, context: Context, code: int) -> Context:
        """The context one character on."""
        longer = []
        for level, number in context.runs:
            here, following = self._levels[level], level + 1
            child = self._levels[following].characters.find(code, here.first[number], here.first[number + 1])
            if child >= 0 and following + 1 < len(self._levels) and _followed(self._levels[following], child):
                longer.append((following, child))
        if _followed(self._levels[0], code):
            longer.append((0, code))
        return Context(tuple(longer))

    def likely(self, context: Context) -> list[tuple[int, float]]:
        """(code, probability) of all but a hundredth of what may come next, in no order."""
        found: list[tuple[int, float]] = []
        seen: set[int] = set()
        scale = 1.0
        for level, number in context.runs:
            here, below = self._levels[level], self._levels[level + 1]
            run = slice(here.first[number], here.first[number + 1])
            for code, byte in zip(below.characters[run], below.probabilities[run], strict=True):
                if code not in seen:
                    seen.add(code)
                    found.append((code, scale * PROBABILITIES[byte]))
            scale *= WEIGHTS[here.weights[number]]
            if scale < _ENOUGH:
                return found
        alone = self._levels[0].probabilities
        found.extend((code, scale * PROBABILITIES[alone[code]]) for code in range(SIZE) if code not in seen)
        return found

    def probability(self, context: Context, code: int) -> float:
        """Of one character, however unlikely."""
        scale = 1.0
        for level, number in context.runs:
            here, below = self._levels[level], self._levels[level + 1]
            child = below.characters.find(code, here.first[number], here.first[number + 1])
            if child >= 0:
                return scale * PROBABILITIES[below.probabilities[child]]
            scale *= WEIGHTS[here.weights[number]]
        return scale * PROBABILITIES[self._levels[0].probabilities[code]]


def _followed(level: NgramLevel, number: int) -> bool:
    return level.first[number] < level.first[number + 1]


def _check_sizes(levels: list[NgramLevel]) -> None:
    sizes = [len(level.characters) for level in levels[1:]] + [0]
    if not levels or [level.first[-1] for level in levels] != sizes:
        raise ValueError("its levels do not fit together")


def _read_level(arrays: "np.lib.npyio.NpzFile", k: int) -> NgramLevel:
    names = ("characters", "probabilities", "children")
    characters, probabilities, children = (np.asarray(arrays[f"{name}_{k}"], np.uint8) for name in names)
    if not len(characters) == len(probabilities) == len(children) or (k == 0 and len(characters) != SIZE):
        raise ValueError(f"level {k} has arrays of different lengths")
    weights = np.full(len(characters), WEIGHT_ONE, np.uint8)
    weights[children > 0] = arrays[f"weights_{k}"]  # only what has children has a weight of its own
    first = np.zeros(len(characters) + 1, np.uint32)
    np.cumsum(children, out=first[1:])
    return NgramLevel(characters.tobytes(), probabilities.tobytes(), weights.tobytes(), array("I", first.tobytes()))
