"""Replay with a reuse forecast."""

import numpy as np
import pytest
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording, draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting

MACHINE = Machine(48, block_bytes=1, link_bytes_per_second=1.0, layer_seconds=0.0)
RECORDING = draw_recording(SyntheticRouting(tokens=120, layers=6, experts=32, top_k=4))


class Knowing:
    """Says after the last layer of a token which experts the next two tokens use."""

    def __init__(self, recording: Recording, doublings: float) -> None:
        self._numbers = recording.routing + np.arange(recording.layers)[:, None] * recording.experts
        self._all, self._doublings = recording.all_experts, doublings
        self._last = recording.layers - 1

    def at(self, token: int, layer: int) -> NDArray[np.floating] | None:
        if layer != self._last:
            return None
        scores = np.zeros(self._all)
        scores[self._numbers[token + 1 : token + 3].ravel()] = self._doublings
        return scores


def test_who_knows_the_next_tokens_misses_less_than_lfru_and_not_less_than_belady() -> None:
    known = replay(RECORDING, MACHINE, "reuse", reuse=Knowing(RECORDING, 20.0)).hit_rate
    assert replay(RECORDING, MACHINE, "lfru").hit_rate + 0.02 < known
    assert known <= replay(RECORDING, MACHINE, "belady").hit_rate


def test_a_forecast_that_says_nothing_changes_little() -> None:
    told = replay(RECORDING, MACHINE, "reuse", reuse=Knowing(RECORDING, 0.0)).hit_rate
    assert told == pytest.approx(replay(RECORDING, MACHINE, "lfru").hit_rate, abs=0.01)


def test_the_policy_and_its_forecast_go_together() -> None:
    with pytest.raises(ConfigError, match="go together"):
        replay(RECORDING, MACHINE, "reuse")
    with pytest.raises(ConfigError, match="go together"):
        replay(RECORDING, MACHINE, "lfru", reuse=Knowing(RECORDING, 1.0))
