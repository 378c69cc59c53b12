"""Moves the experts that an answer is likely to begin with, while its prompt is still being typed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import InputError
from steerpipe.core.ids import ExpertId
from steerpipe.model.spec import ModelSpec
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, find_openings
from steerpipe.runtime.draft_plan import OpeningPlan, plan_opening, plan_promotion
from steerpipe.runtime.draft_routing import DraftRouting, Routing
from steerpipe.store.policies import Lfru, Policy
from steerpipe.transfer.promotion import Promotion

MOST_IN_FLIGHT = 16  # a slot is emptied when its transfer begins: Enter may come before it ends


class Moving(Protocol):
    """See `transfer.anticipation.Anticipation`."""

    def expect(self, wanted: Sequence[ExpertId], keep: Iterable[ExpertId]) -> int: ...

    @property
    def bytes_in_flight(self) -> int: ...


class Foreseen(Protocol):
    """A source whose experts come and go, on a CPU or a GPU."""

    @property
    def experts(self) -> tuple[ExpertId, ...]: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def residents(self) -> list[ExpertId]: ...

    @property
    def slots(self) -> int: ...

    @property
    def tokens(self) -> float: ...

    @property
    def promotion(self) -> Promotion | None: ...

    def anticipation(self) -> Moving: ...


@dataclass(frozen=True, slots=True)
class Readiness:
    """Of the experts that the answer's beginning is expected to use."""

    ready: int
    expected: int
    bytes_in_flight: int


class DraftForecast:
    """One for a ladder. Engine's thread; never waits."""

    def __init__(self, source: Foreseen, table: OpeningTable, routing: DraftRouting) -> None:
        self.moves = self.promotes = True  # into slots, and from the disk into RAM
        self.table = table
        self.routing = routing
        self._source = source
        self._moving = source.anticipation()
        self._number = {expert: number for number, expert in enumerate(source.experts)}
        self._plan: OpeningPlan | None = None
        self.pending = False  # something is on its way, and more may follow
        self._rates: NDArray[np.float32] = np.zeros(len(source.experts), np.float32)

    def expect(self, routed: Iterable[Routing], tail: Mapping[int, float], tokens: float) -> None:
        """What is known of the prompt now: how `tokens` of it were `routed`, and how often each token of the rest of it
        may come."""
        uses = self.table.routing_of(tail)
        for each in routed:
            uses += each
        self._rates = self.table.forecast(uses, tokens + sum(tail.values())).reshape(-1)
        if self.promotes:
            self.promote()
        if self.moves:
            self.move()

    def go_on(self) -> None:
        """Sends for more when what was sent for has landed."""
        if self.pending and not self._moving.bytes_in_flight:
            self.move()

    def move(self) -> None:
        """Sends for what is wanted most and is not there, a few at a time."""
        source = self._source
        policy = source.policy
        counts = policy.counts(source.tokens) if isinstance(policy, Lfru) else np.zeros_like(self._rates)
        present = np.zeros(len(self._rates), dtype=np.bool_)
        present[[self._number[expert] for expert in source.residents]] = True
        self._plan = plan_opening(self._rates, counts, present, source.slots)
        if isinstance(policy, Lfru):  # else what has not been used yet would be the first to go
            policy.anticipate(self._plan.wanted, self._rates[self._plan.wanted] * FIRST_TOKENS, source.tokens)
        wanted = self._experts(self._plan.send)[:MOST_IN_FLIGHT]
        self.pending = self._moving.expect(wanted, self._experts(self._plan.keep)) > 0

    def promote(self) -> None:
        """What is likely and neither in a slot nor in RAM is read from the disk when nobody else reads."""
        promotion = self._source.promotion
        if promotion is None:
            return
        chosen = self._experts(plan_promotion(self._rates, promotion.tier.blocks))
        here = {*self._source.residents, *promotion.tier.held()}
        promotion.expect([expert for expert in chosen if expert not in here], chosen)

    def stop_promoting(self) -> None:
        """From now on the disk is for whoever waits; the block that is being read still comes."""
        if self._source.promotion is not None:
            self._source.promotion.expect(())

    @property
    def bytes_in_flight(self) -> int:
        return self._moving.bytes_in_flight

    @property
    def readiness(self) -> Readiness:
        if self._plan is None:
            return Readiness(0, 0, 0)
        there = set(self._source.residents)
        wanted = self._experts(self._plan.wanted)
        return Readiness(sum(e in there for e in wanted), len(wanted), self._moving.bytes_in_flight)

    def withdraw(self) -> None:
        """Nobody types any more: what is on its way is cut, what has landed stays."""
        self._plan, self.pending = None, False
        self._moving.expect((), ())
        self.stop_promoting()

    def _experts(self, numbers: NDArray[np.int64]) -> list[ExpertId]:
        return [self._source.experts[number] for number in numbers.tolist()]


def draft_forecast(
    spec: ModelSpec, folder: Path, source: Foreseen, learnt: OpeningTable | None = None
) -> DraftForecast | None:
    """For a model whose layers have equally many experts; None for another. `learnt`: where nobody made a table."""
    layers = spec.moe_layers
    counts = {spec.moe(layer).experts for layer in layers}
    if len(counts) != 1:
        return None
    (experts,) = counts
    table = find_openings(folder) or learnt or OpeningTable.unknown(len(layers), experts)
    if table.answer.shape != (len(layers), experts):
        of_layers, of_experts = table.answer.shape
        raise InputError(
            f"the openings beside {folder} are of a model with {of_layers} MoE layers of {of_experts} experts; this "
            f"one has {len(layers)} of {experts}", fix="remove openings.npz from its folder predictors",
        )  # fmt: skip
    return DraftForecast(source, table, DraftRouting(layers, experts))
