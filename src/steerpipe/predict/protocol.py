"""What every predictor is."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from steerpipe.predict.sight import Decision, Sight


@dataclass(frozen=True, slots=True)
class Cost:
    """What a predictor is made of, summed over the layers and horizons it covers, and what one decision costs."""

    parameters: int
    multiply_adds: int  # of one decision (one token, one target layer), on average


class RoutingPredictor(Protocol):
    """Says how likely each expert of a layer is to be routed to. Stateless: all it knows of the past is the sight."""

    @property
    def name(self) -> str: ...

    @property
    def horizons(self) -> Sequence[int]:
        """Horizons it answers for; see `sight`."""
        ...

    def probabilities(self, sight: Sight) -> Tensor:
        """[R, E] fp32 in [0, 1]: that each expert is among the k of `sight.decision.target`. No host sync needed."""
        ...

    def cost(self) -> Cost: ...


@runtime_checkable
class AnswersSome(Protocol):
    """A predictor that answers for these decisions only; others answer for every layer at their horizons."""

    @property
    def decisions(self) -> Collection[Decision]: ...


def answers(predictor: RoutingPredictor, decision: Decision) -> bool:
    """May it be asked?"""
    if isinstance(predictor, AnswersSome):
        return decision in predictor.decisions
    return decision.horizon in predictor.horizons
