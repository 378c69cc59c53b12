"""Forecasts of all running requests are one queue; and a switch that empties it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.protocol import Cost
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Sight
from steerpipe.predict.trials import WATCH_TOKENS, Verdict
from steerpipe.runtime.steering import Steering
from steerpipe.transfer.plan import Plan
from tests.law.test_law_predicted import always_on

EXPERTS = 4
DECODER_LAYERS = (3, 7, 9)


class Source:
    """Nothing is in fast memory; remembers what it was told."""

    block_seconds = 1e-9
    waited_seconds = 0.0

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def steer(self, plan: Plan) -> None:
        self.plans.append(plan)

    def ready(self, layer: int) -> NDArray[np.bool_]:
        return np.zeros(EXPERTS, dtype=np.bool_)


class Rows:
    """Says the same of every layer, a row for each request."""

    name = "rows"
    horizons: tuple[int, ...] = (1, 2)

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self._rows = torch.tensor(rows)

    def probabilities(self, sight: Sight) -> Tensor:
        return self._rows

    def cost(self) -> Cost:
        return Cost(0, 0)


def steered(rows: Sequence[Sequence[float]], most: int = 8) -> tuple[Steering, Source]:
    """One layer of a decode step of as many requests has routed."""
    source = Source()
    steering = Steering(
        [Rows(rows)], Geometry(3, EXPERTS, 1, 2), DECODER_LAYERS, source, most_guesses=most, trials=always_on()
    )
    steering._horizons = lambda predictor: [1, 2]  # type: ignore[method-assign]  # as if a block took two layers
    step(steering, len(rows))
    return steering, source


def step(steering: Steering, rows: int) -> bool:
    if not steering.begin(tuple(SequenceId(i) for i in range(rows)), torch.zeros(rows, dtype=torch.int64), decode=True):
        return False
    steering._layer_seconds = 1.0  # so that every guess has time
    state, chosen = torch.zeros(rows, 2), torch.zeros(rows, 1, dtype=torch.int64)
    steering.entering(3, state)
    steering.routed(RouterProbe(3, state, chosen, torch.ones(rows, 1), None))
    return True


def test_an_expert_is_wanted_if_any_request_wants_it() -> None:
    """0.5 and 0.6 of two requests are 0.8 together: 1 - 0.5 x 0.4, as for chances that do not know each other."""
    _, source = steered([[0.5, 0.0, 0.3, 0.0], [0.6, 0.7, 0.0, 0.0]])
    next_layer = {g.expert.expert: g.probability for g in source.plans[-1].send if g.expert.layer == 7}
    assert next_layer == pytest.approx({0: 0.8, 1: 0.7, 2: 0.3})


def test_the_queue_is_one_most_probable_first_then_the_earlier_deadline() -> None:
    _, source = steered([[0.5, 0.0, 0.3, 0.0], [0.6, 0.7, 0.0, 0.0]])
    order = [guess.expert for guess in source.plans[-1].send]
    assert order == [ExpertId(layer, expert) for expert in (0, 1, 2) for layer in (7, 9)]


@pytest.mark.parametrize(
    ("block_seconds", "horizons"),
    [(0.0, [1]), (0.2, [1]), (1.2, [1]), (1.3, [1, 2]), (2.5, [1, 2, 3]), (99.0, [1, 2, 3])],
)
def test_as_many_layers_ahead_are_asked_as_a_block_takes(block_seconds: float, horizons: list[int]) -> None:
    source, rows = Source(), Rows([[0.9, 0.0, 0.0, 0.0]])
    rows.horizons = (0, 1, 2, 3, 4)
    steering = Steering([rows], Geometry(3, EXPERTS, 1, 2), DECODER_LAYERS, source, most_guesses=8)
    assert steering._horizons(rows) == [1, 2, 3], "before anything was measured"
    steering._layer_seconds, source.block_seconds = 1.0, block_seconds
    assert steering._horizons(rows) == horizons
    rows.horizons = (3,)
    assert steering._horizons(rows) == [3], "who looks no nearer is asked all the same"


@pytest.mark.parametrize(("chosen", "speaks"), [(0, False), (1, True)])
def test_it_begins_as_an_earlier_run_ended(chosen: int, speaks: bool) -> None:
    past, source = Verdict(("none", "rows"), (1.0, 0.5 + (not chosen)), chosen), Source()
    rows = Rows([[0.9, 0.0, 0.0, 0.0]])
    steering = Steering([rows], Geometry(3, EXPERTS, 1, 2), DECODER_LAYERS, source, most_guesses=8, past=past)
    assert steering.past is past and (steering.predictor is rows) == speaks
    for _ in range(WATCH_TOKENS - 1):  # nothing is watched or tried for a while
        assert step(steering, 1)
        steering.end()
    assert (steering.predictor is rows) == speaks and not steering._watch.tokens
    assert any(plan.send for plan in source.plans) == speaks


def test_an_earlier_run_with_others_says_nothing() -> None:
    past = Verdict(("none", "rows", "others"), (1.0, 0.5, 0.4), 2)
    steering = Steering(
        [Rows([[0.9, 0, 0, 0]])], Geometry(3, EXPERTS, 1, 2), DECODER_LAYERS, Source(), most_guesses=8, past=past
    )
    assert steering.past is None and steering.predictor is None


def test_many_requests_share_one_limit() -> None:
    _, source = steered([[0.9, 0.0, 0.0, 0.0], [0.0, 0.8, 0.0, 0.0]], most=2)
    assert [guess.expert for guess in source.plans[-1].send] == [ExpertId(7, 0), ExpertId(9, 0)]


def test_switched_off_nothing_is_predicted_and_what_was_wished_is_taken_back() -> None:
    steering, source = steered([[0.9, 0.0, 0.0, 0.0]])
    assert source.plans[-1].send
    steering.switch(False)
    assert source.plans[-1] == Plan((), ())
    told = len(source.plans)
    assert not step(steering, 1) and len(source.plans) == told
    steering.switch(True)
    assert step(steering, 1) and source.plans[-1].send
