"""A bad predictor is not slower than none: on every stated machine, in simulated time."""

import pytest

from steerpipe.arena.machines import StatedMachine, stated_machines
from steerpipe.transfer.forecasts import RecallPredictor
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting

ROUTING = draw_recording(SyntheticRouting(tokens=60, layers=12, experts=60, top_k=4))
WRONG = RecallPredictor(ROUTING.routing, ROUTING.experts, [0.0, 0.0])
CHANCE = RecallPredictor(ROUTING.routing, ROUTING.experts, [4 / 60, 4 / 60])
GOOD = RecallPredictor(ROUTING.routing, ROUTING.experts, [0.9, 0.8])


def ratio(stated: StatedMachine, predictor: RecallPredictor, *, throttled: bool) -> float:
    """Of the time per token to that without a predictor; the first tokens count too."""
    machine = stated.machine(ROUTING.all_experts)
    none = replay(ROUTING, machine).tpot_mean_seconds
    return replay(ROUTING, machine, predictor=predictor, throttled=throttled).tpot_mean_seconds / none


@pytest.mark.parametrize("stated", stated_machines(), ids=lambda stated: stated.name)
@pytest.mark.parametrize("predictor", [WRONG, CHANCE], ids=["always wrong", "chance"])
def test_a_throttled_predictor_costs_at_most_three_percent(stated: StatedMachine, predictor: RecallPredictor) -> None:
    assert ratio(stated, predictor, throttled=True) <= 1.03


def test_it_is_the_throttle_that_keeps_the_bound() -> None:
    assert ratio(StatedMachine("NVMe", "int4", 0.5), WRONG, throttled=False) > 1.03


def test_the_throttle_takes_nothing_from_a_good_predictor() -> None:
    stated = StatedMachine("PCIe 5", "int4", 0.25)
    free, throttled = (ratio(stated, GOOD, throttled=each) for each in (False, True))
    assert throttled == free < 0.9
