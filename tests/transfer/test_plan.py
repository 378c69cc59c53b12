"""What saves most expected stall goes first; nothing is sent that cannot help."""

import numpy as np

from steerpipe.core.events import Forecast
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.plan import LinkPace, PlanLimits, plan

PACE = LinkPace(block_seconds=4.0, layer_seconds=1.0)
LIMITS = PlanLimits(most=3, least_probability=0.2)


def forecast(layer: int, needed_by: float, **probabilities: float) -> Forecast:
    values = np.zeros(5, dtype=np.float32)
    for name, probability in probabilities.items():
        values[int(name[1:])] = probability
    return Forecast(layer, values, needed_by)


def there(*which: int) -> np.ndarray:
    return np.isin(np.arange(5), which)


def test_the_likeliest_of_a_layer_goes_first() -> None:
    made = plan([forecast(1, 1.0, e0=0.5, e3=0.9, e4=0.7)], [there()], PACE, LIMITS, now=0.0)
    assert [guess.expert.expert for guess in made.send] == [3, 4, 0]


def test_worth_is_probability_times_the_part_that_fits_in() -> None:
    near, far = forecast(1, 1.0, e0=0.9), forecast(3, 3.0, e0=0.5)  # .9 x 1 s against .5 x 3 s
    made = plan([near, far], [there(), there()], PACE, LIMITS, now=0.0)
    assert [guess.expert.layer for guess in made.send] == [3, 1]
    very_far = forecast(4, 100.0, e0=0.5)  # no more than a whole block can be saved
    made = plan([far, very_far], [there(), there()], PACE, LIMITS, now=0.0)
    assert [guess.expert.layer for guess in made.send] == [4, 3]


def test_what_is_there_is_protected_and_not_sent() -> None:
    made = plan([forecast(2, 2.0, e1=0.8, e2=0.6)], [there(1)], PACE, LIMITS, now=0.0)
    assert [guess.expert for guess in made.send] == [ExpertId(2, 2)]
    assert set(made.protect) == {ExpertId(2, 1), ExpertId(2, 2)}


def test_the_unlikely_and_the_too_late_are_left_out() -> None:
    made = plan([forecast(2, 2.0, e1=0.19)], [there()], PACE, LIMITS, now=0.0)
    assert made.send == () and made.protect == ()
    made = plan([forecast(2, 2.0, e1=0.9)], [there()], PACE, LIMITS, now=2.0)
    assert made.send == ()


def test_no_more_than_the_limit_is_sent() -> None:
    made = plan([forecast(1, 1.0, e0=0.5, e1=0.6, e2=0.7, e3=0.8)], [there()], PACE, LIMITS, now=0.0)
    assert [guess.expert.expert for guess in made.send] == [3, 2, 1]
    assert all(guess.deadline == 1.0 for guess in made.send)
