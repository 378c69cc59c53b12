"""A predictor beside the step is shown what it was trained on, and says what it says there; no graph runs here."""

import pytest
import torch

from steerpipe.kernels.foretell import SURE
from steerpipe.kernels.history import TransformerKernels
from steerpipe.model.gpu.apart import ApartForecaster, Network, SteerApart, shown
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.mailbox import INDEX, Mailbox
from steerpipe.predict.sight import Decision, Sight
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.window import Window, read_window
from tests.model.gpu.test_steer import Told
from tests.predict.planted import GEOMETRY, by_layer_before, ruled_trace

LAYERS, EXPERTS = range(GEOMETRY.layers), GEOMETRY.experts
STEP = (2, 4, 6, 8, 10, 12)  # layers of a step that somebody is asked about
ROW = 30  # a token in the middle of its sequence


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize(("steps", "horizon"), [(3, 2), (10, 1)])
def test_what_is_shown_and_said_is_that_of_training(architecture: Architecture, steps: int, horizon: int) -> None:
    torch.manual_seed(0)
    trace = ruled_trace(by_layer_before, tokens=50)
    networks = {Decision(target, horizon): build(architecture, EXPERTS, steps) for target in LAYERS}
    trained = Trajectory(architecture, EXPERTS, networks, steps=steps)
    every: list[Network] = list(networks.values())
    if architecture is Architecture.TRANSFORMER:
        every = [TransformerKernels(each.state_dict(), steps, GEOMETRY.top_k) for each in networks.values()]
    made = ApartForecaster(tuple(every), EXPERTS, GEOMETRY.top_k, steps, horizon, torch.float32)
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


class Asked:
    """An Apart without graphs: notes what it is shown and asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.forecaster = ApartForecaster((), EXPERTS, GEOMETRY.top_k)
        self.words = Mailbox(len(STEP), NAMED, pinned=False)
        self.begun = 0
        self.busy, self.asked, self.shown = False, list[tuple[int, int]](), list[tuple[int, list[int]]]()

    def begin(self) -> None:
        self.begun += 1
        self.shown.clear()

    def show(self, order: int, routed: list[int]) -> None:
        self.shown.append((order, routed))

    def ask(self, order: int, stamp: int) -> bool:
        if not self.busy:
            self.asked.append((order, stamp))
        return not self.busy

    def answer(self, *experts: int) -> None:
        """To the last question, surely."""
        order, stamp = self.asked[-1]
        self.words.words[order] = stamp << 32
        self.words.words[order, : len(experts)] = stamp << 32 | SURE << 16 | torch.tensor(experts)


def steered() -> tuple[SteerApart, Asked, Told]:
    apart, told = Asked(), Told()
    made = SteerApart(told, apart, STEP)  # type: ignore[arg-type]
    made.begin(1)
    return made, apart, told


def test_an_interrupted_step_leaves_no_question_to_the_next() -> None:
    made, apart, _ = steered()
    made.served([1])  # and the host is interrupted before it asks
    made.begin(2)
    made.poll()
    assert apart.asked == apart.shown == []
    made.served([1])
    made.poll()
    assert apart.asked == [(0, 2)] and apart.shown == [(0, [1])]
    assert apart.begun == 2, "each step forgets the routing of the one before"


def test_kernels_for_another_window_are_refused() -> None:
    state = build(Architecture.TRANSFORMER, EXPERTS, 3).state_dict()
    kernels = TransformerKernels(state, 3, GEOMETRY.top_k)
    with pytest.raises(AssertionError, match="another window"):
        ApartForecaster((kernels,), EXPERTS, GEOMETRY.top_k, steps=4)
    with pytest.raises(AssertionError, match="another window"):
        ApartForecaster((kernels,), EXPERTS, GEOMETRY.top_k - 1, steps=3)


def test_a_question_waits_for_the_answer_before_it_and_is_dropped_when_the_next_layer_has_come() -> None:
    made, apart, told = steered()
    for order in range(3):
        made.served([order])
        made.poll()
        made.poll()
    assert apart.asked == [(0, 1)] and [order for order, _ in apart.shown] == [0, 1, 2], "all are shown, once"
    apart.answer(3)  # of layer 2, which has come
    made.poll()
    assert apart.asked == [(0, 1), (2, 1)], "about the last one"
    apart.answer(5, 4)
    made.poll()
    assert told.expected[-1] == [(10, 5), (10, 4)]
    questions = apart.forecaster.questions
    assert (questions.possible, questions.asked, questions.in_time) == (3, 2, 1)


def test_a_graph_that_still_runs_is_asked_at_the_next_look() -> None:
    made, apart, _ = steered()
    apart.busy = True  # with a question of a step that was interrupted
    made.served([1])
    made.poll()
    assert apart.asked == []
    apart.busy = False
    made.poll()
    made.poll()
    assert apart.asked == [(0, 1)] and apart.forecaster.questions.possible == 1


def test_what_is_answered_between_two_steps_is_of_the_next_tokens_first_layers() -> None:
    made, apart, told = steered()
    for order in range(len(STEP)):
        made.served([order])
    made.poll()
    assert apart.asked == [(5, 1)]
    apart.answer(2)
    made.begin(2)
    told.idle = True
    made.poll()
    assert told.expected[-1] == [(4, 2)]


def test_what_is_answered_after_a_step_was_interrupted_is_of_no_use() -> None:
    made, apart, told = steered()
    made.served([1])
    made.poll()
    apart.answer(2)  # of layer 2 of a step that has no layer 2
    made.begin(2)
    told.idle = True
    made.poll()
    assert not any(told.expected)
