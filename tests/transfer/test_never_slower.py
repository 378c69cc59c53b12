"""A bad predictor is not slower than none: on every stated machine, in simulated time."""

from dataclasses import replace

import pytest

from steerpipe.arena.machines import StatedMachine, stated_machines
from steerpipe.transfer.forecasts import Predictor, RecallPredictor
from steerpipe.transfer.machine import Looking
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting

ROUTING = draw_recording(SyntheticRouting(tokens=60, layers=12, experts=60, top_k=4))
WRONG = RecallPredictor(ROUTING.routing, ROUTING.experts, [0.0, 0.0])
CHANCE = RecallPredictor(ROUTING.routing, ROUTING.experts, [4 / 60, 4 / 60])
GOOD = RecallPredictor(ROUTING.routing, ROUTING.experts, [0.9, 0.8])


BAD = {"always wrong": WRONG, "chance": CHANCE}
# Each machine meets one of the two, and each link, format and residency meets both; the rest is for `make test-slow`.
CASES = [
    pytest.param(
        predictor, stated, id=f"{name}-{stated.name}", marks=() if (row + column) % 2 == 0 else pytest.mark.slow
    )
    for row, (name, predictor) in enumerate(BAD.items())
    for column, stated in enumerate(stated_machines())
]


def ratio(stated: StatedMachine, predictor: RecallPredictor, *, throttled: bool) -> float:
    """Of the time per token to that without a predictor; the first tokens count too."""
    machine = stated.machine(ROUTING.all_experts)
    none = replay(ROUTING, machine).tpot_mean_seconds
    return replay(ROUTING, machine, predictor=predictor, throttled=throttled).tpot_mean_seconds / none


def paid(stated: StatedMachine, predictor: Predictor) -> float:
    """The same where looking ahead costs what it did on an H200, and a host stands between two tokens."""
    looking = Looking(tap_seconds=5.7e-6, delay_seconds=41e-6, most=2, stops=True)
    machine = replace(stated.machine(ROUTING.all_experts), looking=looking, between_seconds=0.41e-3)
    none = replay(ROUTING, machine).tpot_mean_seconds
    return replay(ROUTING, machine, predictor=predictor, throttled=True).tpot_mean_seconds / none


@pytest.mark.parametrize(("predictor", "stated"), CASES)
def test_a_throttled_predictor_costs_at_most_three_percent(stated: StatedMachine, predictor: RecallPredictor) -> None:
    assert ratio(stated, predictor, throttled=True) <= 1.03


@pytest.mark.parametrize(("predictor", "stated"), CASES)
def test_so_it_does_where_looking_ahead_is_paid_for(stated: StatedMachine, predictor: RecallPredictor) -> None:
    assert paid(stated, predictor) <= 1.03


class Nobody:
    """Looks ahead and is never sure."""

    horizon = 1

    def predict(self, token: int, layer: int, ahead: int) -> list[int]:
        return []


def test_who_is_never_sure_costs_at_most_three_percent() -> None:
    assert 1 < paid(StatedMachine("PCIe 5", "int4", 0.5), Nobody()) <= 1.03


def test_it_is_the_throttle_that_keeps_the_bound() -> None:
    assert ratio(StatedMachine("NVMe", "int4", 0.5), WRONG, throttled=False) > 1.03


def test_the_throttle_takes_nothing_from_a_good_predictor() -> None:
    stated = StatedMachine("PCIe 5", "int4", 0.25)
    free, throttled = (ratio(stated, GOOD, throttled=each) for each in (False, True))
    assert throttled == free < 0.9
