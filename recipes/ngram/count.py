"""Counts n-grams of any order, level by level.

Level k holds the k-grams that occur at least so often, sorted by (parent, last character); a k-gram's parent is the
(k-1)-gram that it begins with, its suffix the one that it ends with. Both are kept whenever the k-gram is, since they
occur at least as often. Level 1 is dense: the id of a character is its code.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recipes.ngram.corpus import Codes
from steerpipe.intake.alphabet import SIZE, START

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Level:
    parent: Ids
    character: Codes
    count: npt.NDArray[np.int64]
    suffix: Ids

    def __len__(self) -> int:
        return len(self.parent)


def count_levels(codes: Codes, orders: int, least: int) -> list[Level]:
    """Levels 1 to `orders`; from level 4 on, only what occurs `least` times or more. `codes` end with a START."""
    assert codes[-1] == START, "no n-gram may end with the last code"
    counts = np.bincount(codes, minlength=SIZE)
    every = np.arange(SIZE)
    levels = [Level(np.zeros(SIZE, np.int32), every.astype(np.uint8), counts, np.zeros(SIZE, np.int32))]
    # `context[i]`: id at the current level of what ends just before position i; -1 where that was not kept.
    context = np.full(len(codes), -1, dtype=np.int32)
    context[1:] = codes[:-1]
    at = np.flatnonzero((codes != START) & (context >= 0))
    for order in range(2, orders + 1):
        keys = context[at].astype(np.int64) * SIZE + codes[at]
        found, first, inverse, count = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        kept = count >= (1 if order < 4 else least)
        renumbered = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
        suffix = context[at[first[kept]] + 1]  # what ends there, one level down
        levels.append(
            Level((found[kept] // SIZE).astype(np.int32), (found[kept] % SIZE).astype(np.uint8), count[kept], suffix)
        )
        context, at = _advance(context, at, renumbered[inverse], codes)
        if not len(at):
            break
    return levels


def _advance(context: Ids, at: npt.NDArray[np.int64], ids: Ids, codes: Codes) -> tuple[Ids, npt.NDArray[np.int64]]:
    """The contexts one level up, and the positions that have one."""
    longer = np.full_like(context, -1)
    longer[at + 1] = ids
    return longer, np.flatnonzero((longer >= 0) & (codes != START))
