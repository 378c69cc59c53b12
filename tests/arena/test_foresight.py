import numpy as np
import pytest

from steerpipe.arena.foresee import foresee, foresee_reuse, recording_of
from steerpipe.arena.foresight import Foresight
from steerpipe.arena.lineup import shipped_reuse
from steerpipe.core.errors import InputError
from steerpipe.predict.bounds import Oracle
from steerpipe.predict.records import Geometry
from steerpipe.predict.reuse import LiveReuse
from steerpipe.runtime.models import find_model
from steerpipe.transfer.forecasts import PerfectPredictor
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.replay import replay
from tests.arena.traces import GEOMETRY, Successor, draw, packed


def test_what_was_said_is_handed_on_likeliest_first_and_nothing_where_nothing_was_said() -> None:
    ranked = np.array([[[[3, 1]]]], dtype=np.int16)
    assert Foresight(ranked, np.array([[[[0.9, 0.2]]]], dtype=np.float32)).predict(0, 0, 1) == [3, 1]
    assert Foresight(ranked, np.array([[[[0.9, 0.0]]]], dtype=np.float32)).predict(0, 0, 1) == [3]
    assert Foresight(ranked, np.zeros((1, 1, 1, 2), dtype=np.float32)).predict(0, 0, 1) == []


def test_each_distance_has_its_own_forecast() -> None:
    ranked = np.array([[[[3, 1]]], [[[5, 2]]]], dtype=np.int16)
    said = Foresight(ranked, np.array([[[[0.9, 0.8]]], [[[0.7, 0.0]]]], dtype=np.float32))
    assert (said.horizon, said.predict(0, 0, 1), said.predict(0, 0, 2)) == (2, [3, 1], [5])


def test_the_oracle_in_the_simulator_is_the_perfect_predictor_across_tokens_too() -> None:
    trace = packed(draw())
    recording = recording_of(trace, "drawn")
    machine = Machine(slots=12, block_bytes=100, link_bytes_per_second=100.0, layer_seconds=1.5)
    said = foresee(Oracle(), trace, [1, 2], GEOMETRY.top_k)
    found = replay(recording, machine, predictor=said)
    expected = replay(recording, machine, predictor=PerfectPredictor(recording.routing, 2))
    assert found.hits == expected.hits
    assert found.tpot_mean_seconds == expected.tpot_mean_seconds
    assert found.guess_bytes_per_token > 0


def test_horizons_of_several_predictors_join() -> None:
    trace = packed(draw())
    both = foresee(Successor(), trace, [1, 2], 2)
    near, far = (foresee(Successor(), trace, [horizon], 2) for horizon in (1, 2))
    joined = near.joined([far])
    assert joined.horizon == 2
    for ahead in (1, 2):
        assert joined.predict(25, 3, ahead) == both.predict(25, 3, ahead)
    assert sorted(joined.predict(25, 3, 2)) == sorted(trace.experts[25, 3].tolist())


def test_a_reuse_forecast_is_asked_token_after_token_and_begins_anew_with_each_text() -> None:
    forecast = shipped_reuse(find_model(None))
    assert forecast is not None
    shape = Geometry(layers=24, experts=60, top_k=4, hidden=192)
    trace = packed(draw(prompts=2, tokens=5, states=True, geometry=shape), shape)
    told = foresee_reuse(forecast, trace)
    assert told.half_life_tokens == forecast.config.count_tokens
    live, tap = LiveReuse(forecast), forecast.config.taps[0]
    assert told.at(3, next(layer for layer in range(24) if layer not in forecast.config.taps)) is None
    assert trace.states is not None
    for token in range(5, 8):  # of the second text
        expected = live.at(tap, trace.states.residual[token : token + 1, tap])
        found = told.at(token, tap)
        assert expected is not None and found is not None
        np.testing.assert_array_equal(found, expected.numpy())
    with pytest.raises(InputError, match="hidden states"):
        foresee_reuse(forecast, packed(draw()))
