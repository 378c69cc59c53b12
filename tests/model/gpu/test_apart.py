"""A predictor beside the step is shown what it was trained on, and says what it says there; no graph runs here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steerpipe.kernels.foretell import SURE
from steerpipe.model.gpu.apart import ApartForecaster, SteerApart, shown
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.mailbox import INDEX, Mailbox
from steerpipe.predict.sight import Decision, Sight
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.window import Window, read_window
from tests.model.gpu.test_steer import Told
from tests.predict.planted import GEOMETRY, by_layer_before, ruled_trace

LAYERS, EXPERTS = range(GEOMETRY.layers), GEOMETRY.experts
ROW = 30  # a token in the middle of its sequence


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize(("steps", "horizon"), [(3, 2), (10, 1)])
def test_what_is_shown_and_said_is_that_of_training(architecture: Architecture, steps: int, horizon: int) -> None:
    torch.manual_seed(0)
    trace = ruled_trace(by_layer_before, tokens=50)
    networks = {Decision(target, horizon): build(architecture, EXPERTS, steps) for target in LAYERS}
    trained = Trajectory(architecture, EXPERTS, networks, steps=steps)
    made = ApartForecaster(tuple(networks.values()), EXPERTS, GEOMETRY.top_k, steps, horizon, torch.float32)
    words, stamp, own = torch.zeros(NAMED, dtype=torch.int64), torch.tensor([7]), torch.full((NAMED,), -1)
    for order in LAYERS:
        routed = trace.experts[ROW].long()
        routed[order + 1 :] = -1  # have not come
        later, target = divmod(order + horizon, len(LAYERS))
        sight = Sight(trace, torch.tensor([ROW + later]), Decision(target, horizon))
        seen = shown(routed, order, steps, EXPERTS, torch.float32)
        assert torch.equal(seen, read_window(sight, Window.LAYERS, steps))
        made.answer(routed, order, stamp=stamp, words=words, forced=own)
        (likely,) = trained.probabilities(sight)
        assert (words >> 32 == 7).all() and torch.equal(words & INDEX, likely.argsort(descending=True)[:NAMED])
        torch.testing.assert_close((words >> 16 & SURE) / SURE, likely[words & INDEX], atol=2 / SURE, rtol=0)


def test_an_interrupted_step_leaves_no_question_to_the_next() -> None:
    asked: list[int] = []
    apart: Any = SimpleNamespace(
        forecaster=ApartForecaster((), EXPERTS, GEOMETRY.top_k), words=Mailbox(len(LAYERS), NAMED, pinned=False),
        ask=lambda order, routed, stamp: asked.append(order),
    )  # fmt: skip
    made = SteerApart(Told(), apart, LAYERS)
    made.begin(1)
    made.served([1])  # and the host is interrupted before it asks
    made.begin(2)
    made.poll()
    assert asked == []
    made.served([1])
    made.poll()
    assert asked == [0]
