"""A predictor against the routing that really came: every layer, every horizon it answers for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.arena.metrics import Metrics, Tally, merged
from steerpipe.core.errors import InputError
from steerpipe.predict.protocol import RoutingPredictor, answers
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for

ROWS_AT_ONCE = 16384  # a head of width 2048 in fp32 takes 134 MB for them


@dataclass(frozen=True, slots=True)
class HorizonScore:
    """One predictor at one horizon."""

    horizon: int
    layers: int
    tallies: Mapping[int, Tally]  # by target layer, of those that the predictor answers for

    def layer(self, target: int) -> Metrics | None:
        """None: the predictor does not answer for it."""
        return self.tallies[target].metrics() if target in self.tallies else None

    def overall(self) -> Metrics | None:
        """Mean over the layers that are decided within the token: from layer `horizon` on."""
        return self.over(self.horizon, self.layers)

    def over(self, first: int, end: int) -> Metrics | None:
        """Layers `first` to `end` - 1, as far as they are answered for."""
        tally = self.together(first, end)
        return None if tally is None else tally.metrics()

    def together(self, first: int, end: int) -> Tally | None:
        wanted = [tally for target, tally in self.tallies.items() if first <= target < end]
        return merged(wanted) if wanted else None


def predictions(
    predictor: RoutingPredictor, trace: PackedTrace, decision: Decision, rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows [R], probabilities [R, E]) in pieces, over every row at which `decision` can be taken."""
    for rows in rows_for(trace, decision).split(rows_at_once):
        probabilities = predictor.probabilities(Sight(trace, rows, decision))
        shape = (len(rows), trace.geometry.experts)
        if probabilities.shape != shape:
            raise InputError(
                f"{predictor.name} gave {list(probabilities.shape)}, not {list(shape)}",
                fix="answer with one row for each row of the sight, and one column for each expert",
            )
        yield rows, probabilities


@torch.no_grad()
def evaluate(
    predictor: RoutingPredictor, trace: PackedTrace, horizon: int, missed: Tensor | None = None
) -> HorizonScore:
    """Every target layer that is answered for at `horizon`.

    `missed` [N, L, k] bool: the uses that a cache did not hold (see `misses`).
    """
    tallies = {}
    for target in range(trace.geometry.layers):
        decision = Decision(target, horizon)
        if not answers(predictor, decision):
            continue
        tally = Tally(trace.device)
        for rows, probabilities in predictions(predictor, trace, decision):
            tally.add(
                probabilities,
                trace.experts[rows, target],
                None if trace.weights is None else trace.weights[rows, target],
                None if missed is None else missed[rows, target],
            )
        tallies[target] = tally
    return HorizonScore(horizon, trace.geometry.layers, tallies)
