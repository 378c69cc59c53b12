"""On a GPU whoever is quickest predicts in steps of one row; here the decoder is a clock that tests move."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.timeline import Span, Timeline
from steerpipe.predict.scorecard import Score, Scorecard
from steerpipe.predict.trials import Trials, Verdict
from steerpipe.runtime.predicting import Choice, PredictingDecoder, Speaker
from steerpipe.runtime.prediction import Prediction, score_json
from steerpipe.runtime.prediction_state import prediction_state
from steerpipe.runtime.timeline_gpu import RecordingDecoder

SPEAKERS = (Speaker("heads, 1 ahead", "H"), Speaker("lookahead, 1 ahead", "L"))
TRIAL = 8 * 4 * 3


class Card:
    def __init__(self) -> None:
        self.card = Scorecard(2)


class Device:
    """A decoder and its clock: a step takes as long as `seconds` says of who predicts in it."""

    spec: Any = None
    rows_device = torch.device("cpu")

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.forecaster: Any = None
        self.replays = 0
        self.now = 0.0
        self.waits = 0
        self.spoke: list[Any] = []
        self._seconds, self._queued = seconds, 0.0

    def forward(self, rows: Any, experts: Any, wanted: Sequence[int], sink: Any = None) -> Tensor:
        self.replays += rows == "one"
        self.spoke.append(self.forecaster)
        self._queued += self._seconds[self.forecaster] if rows == "one" else 70.0
        return torch.zeros(1)

    def wait(self) -> None:
        self.waits += 1
        self.now, self._queued = self.now + self._queued, 0.0


def opened(seconds: dict[Any, float]) -> tuple[Device, Choice, PredictingDecoder, list[Verdict]]:
    device, verdicts = Device(seconds), []
    choice = Choice(SPEAKERS, Card(), verdicts.append)
    return device, choice, PredictingDecoder(device, choice, device.wait, lambda: device.now), verdicts


def run(decoder: PredictingDecoder, count: int, rows: Any = "one") -> None:
    for _ in range(count):
        decoder.forward(rows, None, (0,))  # type: ignore[arg-type]


def test_all_are_tried_and_the_quickest_goes_on() -> None:
    device, choice, decoder, verdicts = opened({None: 6.5, "H": 6.0, "L": 6.2})
    run(decoder, TRIAL)
    assert {each: device.spoke.count(each) for each in (None, "H", "L")} == {None: 32, "H": 32, "L": 32}
    assert [each.seconds for each in verdicts] == [pytest.approx((6.5, 6.0, 6.2))]
    run(decoder, 100)
    assert set(device.spoke[TRIAL:]) == {"H"} and choice.predictor is SPEAKERS[0]


def test_nobody_goes_on_where_none_pays() -> None:
    device, choice, decoder, verdicts = opened({None: 6.0, "H": 6.1, "L": 5.99})
    run(decoder, TRIAL + 10)
    assert choice.predictor is None and set(device.spoke[TRIAL:]) == {None}
    assert verdicts[0].line() == "prediction does not pay here (lookahead, 1 ahead: -0% per token): off"


def test_only_steps_that_count_are_waited_for() -> None:
    device, _, decoder, _ = opened({None: 6.5, "H": 6.0, "L": 6.2})
    run(decoder, TRIAL)
    assert device.waits == TRIAL
    run(decoder, 50)
    assert device.waits == TRIAL


def test_steps_that_are_no_graph_of_one_row_decide_nothing() -> None:
    device, choice, decoder, verdicts = opened({None: 6.5, "H": 6.0, "L": 6.2})
    for _ in range(TRIAL):
        run(decoder, 2, rows="sixteen")
        device.wait()
        run(decoder, 1)
    assert [each.seconds for each in verdicts] == [pytest.approx((6.5, 6.0, 6.2))]
    assert choice.predictor is SPEAKERS[0]


def test_a_step_that_fails_decides_nothing() -> None:
    device, choice, decoder, _ = opened({None: 6.5, "H": 6.0, "L": 6.2})
    left = choice.trials.left
    device._seconds.clear()
    with pytest.raises(KeyError):
        run(decoder, 1)
    assert choice.trials.left == left


def test_a_switch_silences_everybody_and_the_trial_goes_on_where_it_was() -> None:
    device, choice, decoder, verdicts = opened({None: 6.5, "H": 6.0, "L": 6.2})
    run(decoder, 20)
    left = choice.trials.left
    choice.switch(on=False)
    assert choice.standing() == "prediction: switched off"
    run(decoder, 30)
    assert set(device.spoke[20:]) == {None} and choice.trials.left == left and choice.predictor is None
    choice.switch(on=True)
    assert f"tried for 20 of {20 + left} tokens" in (choice.standing() or "")
    run(decoder, TRIAL - 20)
    assert verdicts[-1].chosen == 1


def test_the_line_says_how_far_a_trial_is() -> None:
    _, choice, decoder, verdicts = opened({None: 6.5e-3, "H": 6.0e-3, "L": 6.2e-3})
    made = Prediction(10.0, choice, verdicts=verdicts, standing=choice.standing)
    assert made.line() == (
        "prediction: none yet; on a GPU it is for answers decoded one at a time (serve --max-batch 1)"
    )
    run(decoder, 24)
    assert made.line() == "prediction: heads, 1 ahead and lookahead, 1 ahead, tried for 24 of 96 tokens"
    run(decoder, TRIAL - 24)
    assert made.lines() == ["prediction by heads, 1 ahead saves 8% per token (6.00 instead of 6.50 ms): on"]
    choice.switch(on=False)
    assert made.line() == "prediction: switched off"


def test_clients_see_one_format_wherever_it_was_counted() -> None:
    card = Card()
    choice = Choice(SPEAKERS, card, print, Trials(["none", "a", "b"]))
    counted = np.array([[1, 4, 3, 2, 1, 2, 1, 1], [2, 8, 6, 4, 3, 2, 2, 0]])
    for _ in range(2):
        card.card.add("heads, 1 ahead", counted)
    made = Prediction(10.0, choice, eviction=lambda: "eviction by the reuse forecast: on", beside=lambda: "c")
    said, state = made.as_json(), prediction_state(made)
    assert said is not None and state is not None and state.block_bytes == 10.0
    assert said["eviction"] == state.eviction == "eviction by the reuse forecast: on"
    assert said["beside"] == state.beside == made.lines()[0] == "c"
    own = said["scores"]["heads, 1 ahead"]
    assert own["missing"] == 12 and own["recall_on_misses"] == 8 / 12 and own["precision"] == 6 / 8
    assert own["layers"] == {
        "missing": [4, 8], "foreseen": [2, 6], "sent": [4, 4], "used": [2, 4], "useful_bytes": [20, 0],
        "late_bytes": [0, 40], "wasted_bytes": [20, 0], "stall_hidden_ms": [None, None],
    }  # fmt: skip
    assert (own["useful_bytes"], own["late_bytes"], own["wasted_bytes"], own["stall_hidden_ms"]) == (20, 40, 20, None)
    timed = score_json(dict(state.scores)["heads, 1 ahead"], state.layers[0], 10.0, 5e-3)
    assert timed["stall_hidden_ms"] == 10.0 and timed["layers"]["stall_hidden_ms"] == [10.0, 0.0]
    blind = score_json(Score(decisions=2, routed=8, named=6), [Score(1, 4, 3)], 10.0, 5e-3)
    assert blind["useful_bytes"] is blind["stall_hidden_ms"] is blind["layers"]["wasted_bytes"][0] is None
    assert dict(state.scores)["heads, 1 ahead"] == Score(6, 24, 18, 12, 8, 8, 6, 2)


class Parts:
    """A device's clock that is 100 seconds behind the host's."""

    def __init__(self, device: Device, *parts: tuple[str, float, float]) -> None:
        self._device, self._parts = device, parts

    def parts(self) -> list[tuple[str, float, float]]:
        return list(self._parts)

    def now(self) -> float:
        return self._device.now - 100.0


class Moved:
    """What was copied, in seconds after the pass began."""

    def begin(self) -> None:
        pass

    def take(self) -> list[tuple[str, str, float, float]]:
        return [("stream 1: copies", "8 bytes", 0.5, 1.5)]


def test_a_timeline_lays_the_devices_clock_over_the_hosts() -> None:
    device, timeline = Device({None: 4.0}), Timeline()
    compute = Parts(device, ("layer 0: attention and router", -99.0, -98.0), ("layer 0: experts", -98.0, -96.0))
    guesses = Parts(device, ("layer 1: guesses", -120.0, -119.0), ("layer 1: guesses", -97.5, -96.5))
    decoder = RecordingDecoder(
        cast(Any, device), timeline, compute, guesses, Moved(), lambda: device.replays, device.wait, lambda: device.now
    )
    decoder.forward(cast(Any, "one"), cast(Any, None), (0,))
    assert [(span.name, span.begin, span.end) for span in timeline.spans("stream 0: compute")] == [
        ("layer 0: attention and router", 1.0, 2.0), ("layer 0: experts", 2.0, 4.0),
    ]  # fmt: skip
    assert [(span.begin, span.end) for span in timeline.spans("stream 1: guesses")] == [(2.5, 3.5)]  # not an old one
    prompt = SimpleNamespace(decode=False, real=range(7))
    decoder.forward(cast(Any, prompt), cast(Any, None), (0,))
    assert [(span.begin, span.end) for span in timeline.spans("stream 1: copies")] == [(0.5, 1.5), (4.5, 5.5)]
    assert timeline.spans("stream 0: compute")[-1] == Span("stream 0: compute", "prompt: 7 rows", 4.0, 74.0)


def test_who_was_quickest_in_an_earlier_run_speaks_from_the_first_token() -> None:
    past = Verdict(("none", "heads, 1 ahead", "lookahead, 1 ahead"), (3.0, 2.0, 1.0), 2)
    choice = Choice(SPEAKERS, Card(), [].append, past=past)
    assert choice.past is past and choice.predictor is SPEAKERS[1] and not choice.timed
    others = Choice(SPEAKERS[:1], Card(), [].append, past=past)
    assert others.past is None and others.timed  # somebody else was tried then
    nobody = Choice(SPEAKERS, Card(), [].append, past=Verdict(past.names, (1.0, 2.0, 3.0), 0))
    assert nobody.predictor is None and not nobody.timed
