"""From forecasts to transfers. Pure: no clock, no lock, no torch.

A guess is worth what it is expected to save: its probability times the part of its transfer that fits in before its
layer comes. All blocks of a model are about the same size, so that is also its worth per byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.events import Forecast
from steerpipe.core.ids import ExpertId


@dataclass(frozen=True, slots=True)
class LinkPace:
    """As measured: one block over the link (Tx), and one layer's compute without stalls (Tc)."""

    block_seconds: float
    layer_seconds: float


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """`most`: guesses on their way at once. `least_probability`: below it a guess displaces more than it brings."""

    most: int
    least_probability: float


@dataclass(frozen=True, slots=True)
class Guess:
    expert: ExpertId
    probability: float
    deadline: float  # its layer's router decides: what has not landed by then goes on as demand, or is cut


@dataclass(frozen=True, slots=True)
class Plan:
    send: tuple[Guess, ...]  # the most valuable first; perhaps on their way already
    protect: tuple[ExpertId, ...]  # likely enough to be used soon: not to be evicted for a guess


def plan(
    forecasts: Sequence[Forecast], ready: Sequence[NDArray[np.bool_]], pace: LinkPace, limits: PlanLimits, now: float
) -> Plan:
    """`ready[i]`: which experts of `forecasts[i].layer` are there. Seconds are on the clock of the forecasts."""
    offers: list[tuple[float, Guess]] = []
    protect: list[ExpertId] = []
    for forecast, there in zip(forecasts, ready, strict=True):
        likely = forecast.probability >= limits.least_probability
        protect.extend(ExpertId(forecast.layer, int(each)) for each in np.flatnonzero(likely & there))
        window = min(pace.block_seconds, max(forecast.needed_by_seconds - now, 0.0))
        for each in np.flatnonzero(likely & ~there):
            probability = float(forecast.probability[each])
            guess = Guess(ExpertId(forecast.layer, int(each)), probability, forecast.needed_by_seconds)
            offers.append((probability * window, guess))
    offers.sort(key=lambda offer: (-offer[0], offer[1].deadline, offer[1].expert))
    sent = tuple(guess for worth, guess in offers[: limits.most] if worth > 0)
    return Plan(sent, (*protect, *(guess.expert for guess in sent)))
