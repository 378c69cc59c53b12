"""Which experts should be in fast memory when an answer begins. Pure: numbers in, numbers out.

An expert is worth the uses that are expected of it among the answer's first tokens: as forecast, or as its uses of late
go on, whichever is more. So what the last answer left there stays, unless a guess is worth clearly more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.predict.openings import FIRST_TOKENS

LEAST_USES = 0.5  # of a guess, among the first 16 tokens: below that it is not worth a transfer
CLEARLY = 1.25  # times what it displaces
PROMOTED_USES = 0.25  # of a guess, likewise: worth a place in RAM, which takes nobody's slot


@dataclass(frozen=True, slots=True)
class OpeningPlan:
    """By numbers of experts. `send`: wanted and absent, the most valuable first. `keep`: wanted and there."""

    send: NDArray[np.int64]
    keep: NDArray[np.int64]
    wanted: NDArray[np.int64]


def plan_opening(
    rates: NDArray[np.floating], counts: NDArray[np.floating], present: NDArray[np.bool_], slots: int
) -> OpeningPlan:
    """All [experts of all layers]: forecast uses per token, decayed uses of late, and who has a slot."""
    told = rates * FIRST_TOKENS
    total = counts.sum()  # as many uses per token are shared out by the counts as by the forecast
    worth = np.maximum(told, counts * (told.sum() / total)) if total else told
    wanted = np.argsort(-worth, kind="stable")[:slots]
    wanted = wanted[worth[wanted] > 0]
    send = wanted[~present[wanted] & (told[wanted] >= LEAST_USES)]
    free = slots - int(present.sum())
    outside = np.flatnonzero(present & ~np.isin(np.arange(len(worth)), wanted))
    displaced = np.sort(worth[outside])[: max(0, len(send) - free)]
    paid = len(send) - len(displaced)
    better = np.count_nonzero(worth[send[paid:]][: len(displaced)] > CLEARLY * displaced)
    return OpeningPlan(send[: paid + better], wanted[present[wanted]], wanted)


def plan_promotion(rates: NDArray[np.floating], blocks: int) -> NDArray[np.int64]:
    """Experts that belong in a RAM tier of so many `blocks`, wherever they are now, the likeliest first.

    At most half of the tier: what was read of late is not thrown away for guesses.
    """
    told = rates * FIRST_TOKENS
    likely = np.argsort(-told, kind="stable")[: blocks // 2]
    chosen: NDArray[np.int64] = likely[told[likely] >= PROMOTED_USES]
    return chosen
