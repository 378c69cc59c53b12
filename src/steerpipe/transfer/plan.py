"""From forecasts to transfers. Pure: no clock, no lock, no torch.

A byte that is moved before its layer comes saves its share of a stall if its expert is used, so what it is expected to
save is its expert's probability, whatever its size and its layer: the most confident go first. A guess is taken while
some of it fits into the link time that is left before its layer, after the guesses taken before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.events import Forecast
from steerpipe.core.ids import ExpertId


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """`block_seconds`: one block over the link, as measured. `most`: guesses on their way at once.
    `least_probability`: below it a guess displaces more than it brings.
    """

    block_seconds: float
    most: int
    least_probability: float


@dataclass(frozen=True, slots=True)
class Guess:
    expert: ExpertId
    probability: float
    deadline: float  # when its layer's router decides


@dataclass(frozen=True, slots=True)
class Plan:
    send: tuple[Guess, ...]  # by confidence; some may be on their way already
    protect: tuple[ExpertId, ...]  # likely enough to be used soon: not to be evicted for a guess


def plan(forecasts: Sequence[Forecast], ready: Sequence[NDArray[np.bool_]], limits: PlanLimits, now: float) -> Plan:
    """`ready[i]`: which experts of `forecasts[i].layer` are there. `now` is on the clock of the forecasts."""
    offers: list[Guess] = []
    protect: list[ExpertId] = []
    for forecast, there in zip(forecasts, ready, strict=True):
        likely = forecast.probability >= limits.least_probability
        protect.extend(ExpertId(forecast.layer, int(each)) for each in np.flatnonzero(likely & there))
        offers.extend(
            Guess(ExpertId(forecast.layer, int(each)), float(forecast.probability[each]), forecast.needed_by_seconds)
            for each in np.flatnonzero(likely & ~there)
        )
    offers.sort(key=lambda guess: (-guess.probability, guess.deadline, guess.expert))
    sent = _fitting(offers, limits, now)
    return Plan(sent, (*protect, *(guess.expert for guess in sent)))


def _fitting(offers: Sequence[Guess], limits: PlanLimits, now: float) -> tuple[Guess, ...]:
    """Those that can begin before their deadline, the link moving what is due sooner first."""
    taken: list[Guess] = []
    for guess in offers:
        if len(taken) == limits.most:
            break
        ahead = sum(each.deadline <= guess.deadline for each in taken) * limits.block_seconds
        if now + ahead < guess.deadline:
            taken.append(guess)
    return tuple(taken)
