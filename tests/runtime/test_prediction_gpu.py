"""A model's trained predictors become what graphs on a GPU carry; no kernel runs here."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.model.weights import ModelWeights, build_weights
from steerpipe.predict.files import save
from steerpipe.predict.head import Input, input_width
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.routers import routers_of_weights
from steerpipe.predict.sight import Decision
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.trials import Verdict
from steerpipe.predict.window import Window
from steerpipe.runtime.models import find_model, open_model
from steerpipe.runtime.prediction import predictors_for
from steerpipe.store.reader import Pack

pytest.importorskip("triton")

from steerpipe.model.gpu.tap import Forecaster, Head, Lookahead
from steerpipe.runtime.prediction_gpu import (
    Driver,
    _why_not,
    beside_line,
    drivers_of,
    history_for,
    history_speakers,
    speaker_of,
    spread,
    why_silent,
)


@functools.cache
def nano() -> tuple[Pack, ModelWeights]:
    pack = open_model(find_model(None), Path("unused"))
    return pack, build_weights(
        pack.spec, pack.family.names, pack.dense(torch.bfloat16), torch.bfloat16, torch.device("cpu")
    )


def speakers(driver: Driver) -> list[Any]:
    pack, weights = nano()
    found = predictors_for(pack.spec, weights, find_model(None), pack.manifest.source)
    return [speaker_of(each, pack.spec, weights, driver) for each in found]


def test_the_embedded_model_has_heads_and_its_routers() -> None:
    heads, lookahead = speakers(Driver.DEVICE)
    assert (heads.name, lookahead.name) == ("trained heads, 1 ahead", "lookahead, 1 ahead")
    (head,), (way,) = heads.predictor.ways, lookahead.predictor.ways
    assert isinstance(head, Head) and isinstance(way, Lookahead)
    assert head.down.shape == (24, 56, 2 * 192 + 2 * 60) and head.down.dtype == torch.bfloat16
    assert head.scale.shape == way.bias.shape == (24,) and head.scale.dtype == torch.float32


def test_where_the_host_sends_they_look_two_layers_ahead() -> None:
    heads, lookahead = speakers(Driver.HOST)
    assert heads.name == "trained heads, 1 and 2 ahead" and heads.predictor.horizon == 2
    assert lookahead.predictor.horizon >= 2 and not heads.predictor.served


def test_where_the_device_could_the_host_takes_turns_with_it() -> None:
    heads, _ = speakers(Driver.HOST_INSTEAD)
    assert heads.name == "trained heads, 1 and 2 ahead, by the host" and heads.predictor.served
    assert heads.predictor.horizon == 2

    def drivers(landing: Any, serves: bool) -> list[Driver]:
        source: Any = SimpleNamespace(landing=landing, serves=lambda experts: serves)
        return drivers_of(source, nano()[0].spec)

    able, unable = SimpleNamespace(guesses=object()), SimpleNamespace(guesses=None)
    assert drivers(able, serves=True) == [Driver.DEVICE, Driver.HOST_INSTEAD]
    assert drivers(able, serves=False) == [Driver.DEVICE]
    assert drivers(unable, serves=True) == [Driver.HOST_INSTEAD]
    assert drivers(None, serves=True) == [Driver.HOST]
    assert drivers(unable, serves=False) == drivers(None, serves=False) == []


def test_a_head_says_the_same_through_the_wider_input() -> None:
    """Its product over what it was trained on is the product over all that a graph shows."""
    pack, weights = nano()
    routers = routers_of_weights(pack.spec, weights)
    parts = {Input.GATES: 60, Input.PREVIOUS_EXPERTS: 60, Input.PREVIOUS_RESIDUAL: 192}
    for inputs in [(), (Input.PREVIOUS_RESIDUAL,), (Input.PREVIOUS_RESIDUAL, Input.GATES), tuple(Input)]:
        down = torch.randn(2, 3, input_width(routers, inputs))
        shown = {each: torch.randn(width) for each, width in parts.items()}
        q = torch.randn(192)
        narrow = torch.cat([q, *(shown[each] for each in parts if each in inputs)])
        wide = torch.cat([q, *shown.values()])
        torch.testing.assert_close(spread(down, inputs, 192, 60) @ wide, down @ narrow)


def test_a_model_never_seen_looks_ahead_with_its_own_routers() -> None:
    pack, weights = nano()
    plain = RouterLookahead(routers_of_weights(pack.spec, weights), shared=True, horizons=(1, 2))
    made = speaker_of(plain, pack.spec, weights, Driver.DEVICE)
    assert made is not None and made.name == "lookahead, 1 ahead"
    (way,) = made.predictor.ways
    assert way.scale.eq(1).all() and way.bias.eq(0).all()
    later = RouterLookahead(routers_of_weights(pack.spec, weights), shared=True, horizons=(2,))
    assert speaker_of(later, pack.spec, weights, Driver.DEVICE) is None


def test_a_row_of_more_experts_than_a_forecast_names_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.runtime.prediction_gpu.NAMED", 3)
    able: Any = SimpleNamespace(landing=SimpleNamespace(guesses=object()))
    assert _why_not(able, nano()[0].spec, exact=True) == "for a row takes 4 experts, and a forecast on a GPU names 3"


def test_it_is_said_why_nobody_predicts() -> None:
    spec = nano()[0].spec

    def source(landing: Any, serves: bool = True) -> Any:
        return SimpleNamespace(landing=landing, serves=lambda experts: serves)

    able = source(SimpleNamespace(guesses=object()))
    assert _why_not(able, spec, exact=True) is None and _why_not(source(None), spec, exact=True) is None
    assert _why_not(able, spec, exact=False) == "for misses are answered without waiting"
    assert _why_not(source(SimpleNamespace(guesses=None)), spec, exact=True) is None  # the host sends
    for few in (source(SimpleNamespace(guesses=None), serves=False), source(None, serves=False)):
        assert "too few slots" in (_why_not(few, spec, exact=True) or "")
    with Pipeline(device="cpu", fast_memory="25%", predict="off", profile=False) as pipe:
        assert pipe.prediction is not None and pipe.prediction.lines() == []


def history(
    horizon: int = 2, layers: int = 24, architecture: Architecture = Architecture.TRANSFORMER, **more: Any
) -> Trajectory:
    """One network in the place of all."""
    network = build(architecture, 60, 10)
    networks = dict.fromkeys([Decision(target, horizon) for target in range(layers)], network)
    return Trajectory(architecture, 60, networks, **more)


def test_a_transformer_is_asked_inside_the_graph_and_beside_it(tmp_path: Path) -> None:
    pack, weights = nano()
    (tmp_path / "predictors").mkdir()
    assert history_for(pack.spec, tmp_path) is None
    save(history(steps=7), tmp_path / "predictors" / "trajectory.safetensors")
    trained = history_for(pack.spec, tmp_path)
    assert trained is not None
    both = history_speakers(trained, pack.spec, weights, [Driver.DEVICE, Driver.HOST_INSTEAD])
    device, host = both
    assert [device.name, host.name] == ["transformer (layers), 2 ahead", "transformer (layers), 2 ahead, by the host"]
    own = device.predictor.history
    assert own.ahead == 2 == host.predictor.horizon and not device.predictor.served
    for kernels in (own.networks, host.predictor.networks):
        assert {(each.steps, each.experts, each.top_k) for each in kernels} == {(7, 60, 4)} and len(kernels) == 24
        assert kernels[0]._out.dtype == torch.bfloat16  # the model's precision
    one, other = own.networks[0], host.predictor.networks[0]
    assert one._out.data_ptr() == other._out.data_ptr() and one._x.data_ptr() != other._x.data_ptr()
    assert {each.dtype for each in trained.tensors().values()} == {torch.float32}
    assert [each.name for each in history_speakers(trained, pack.spec, weights, [Driver.HOST])] == [device.name]
    (alone,) = history_speakers(trained, pack.spec, weights, [Driver.DEVICE])
    assert alone.name == device.name and isinstance(alone.predictor, Forecaster), "the host cannot serve one row"


def test_a_line_says_what_a_question_takes_whom_and_what_the_host_was_answered() -> None:
    pack, weights = nano()
    both = history_speakers(history(), pack.spec, weights, [Driver.DEVICE, Driver.HOST_INSTEAD])
    (name, by_host), ended = (each.name for each in both), [Verdict(("none", "a"), (2.4e-3, 3e-3), 0)]
    inside, asked = both[0].predictor.history.questions, both[1].predictor.questions
    assert beside_line(both, [], 24) == f"prediction: {name} was not asked yet"
    inside.seconds = 26e-6
    assert beside_line(both, ended, 24) == f"prediction: {name} takes 26 us a question beside layers of 100 us"
    asked.seconds = 310e-6  # its graphs are made, and nobody has asked yet
    told = f"prediction: {name} takes 26 us a question; {by_host} takes 310 us a question"
    assert beside_line(both, [], 24) == told
    asked.possible, asked.asked, asked.in_time = 48, 20, 11
    assert beside_line(both, [], 24) == told + " (20 of 48 were asked, 11 answered in time)"


@pytest.mark.parametrize(("trained", "asked"), [(2, 2), (3, 3), (24, 24), (30, 24)])
def test_a_transformer_is_asked_as_far_ahead_as_it_was_trained_and_a_token_at_most(trained: int, asked: int) -> None:
    pack, weights = nano()
    found = history(horizon=trained)
    if trained > asked:  # of the first layers in the token before
        found = Trajectory(Architecture.TRANSFORMER, 60, found.networks | history(horizon=asked).networks)
    inside, apart = history_speakers(found, pack.spec, weights, [Driver.DEVICE, Driver.HOST_INSTEAD])
    assert inside.predictor.history.ahead == apart.predictor.horizon == asked
    assert inside.name == f"transformer (layers), {asked} ahead"


@pytest.mark.parametrize(
    ("trained", "kernels"),
    [(history(architecture=Architecture.MLP), False), (history(horizon=1), True)],
    ids=["torch", "next layer"],
)
def test_who_is_slow_or_looks_at_the_next_layer_is_asked_beside_the_step_alone(
    trained: Trajectory, kernels: bool
) -> None:
    pack, weights = nano()
    (made,) = history_speakers(trained, pack.spec, weights, [Driver.DEVICE, Driver.HOST_INSTEAD])
    own = made.predictor
    assert (len(own.networks), own.experts, own.top_k, own.horizon) == (24, 60, 4, trained.horizons[0])
    assert own.reads_pinned is kernels and made.name == f"{trained.name}, {own.horizon} ahead"


@pytest.mark.parametrize(
    ("trained", "drivers", "why"),
    [
        (history(architecture=Architecture.MLP), [Driver.DEVICE], "too few slots"),
        (history(horizon=1), [Driver.DEVICE], "too few slots"),
        (history(), [], "too few slots"),
        (history(window=Window.TOKENS), [Driver.HOST], "--window layers"),
        (history(without=(3,)), [Driver.HOST], "--window layers"),
        (history(layers=23), [Driver.HOST], "without --target"),
        (history(horizon=0), [Driver.HOST_INSTEAD], "--horizon 2"),
    ],
)
def test_who_cannot_be_asked_does_not_speak_and_it_is_said_why(
    trained: Trajectory, drivers: list[Driver], why: str
) -> None:
    assert why in (why_silent(trained, 24, drivers) or "")
    assert why_silent(history(), 24, [Driver.DEVICE]) is None
    assert why_silent(history(architecture=Architecture.MLP), 24, [Driver.DEVICE, Driver.HOST_INSTEAD]) is None
