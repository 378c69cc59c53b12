"""The most confident guesses go first, as far as the link has time for them before their layers come."""

import numpy as np

from steerpipe.core.events import Forecast
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.plan import PlanLimits, plan

LIMITS = PlanLimits(block_seconds=1.0, most=3, least_probability=0.2)


def forecast(layer: int, needed_by: float, **probabilities: float) -> Forecast:
    values = np.zeros(5, dtype=np.float32)
    for name, probability in probabilities.items():
        values[int(name[1:])] = probability
    return Forecast(layer, values, needed_by)


def there(*which: int) -> np.ndarray:
    return np.isin(np.arange(5), which)


def test_the_likeliest_goes_first_whatever_its_layer() -> None:
    near, far = forecast(1, 5.0, e0=0.5, e3=0.9), forecast(2, 10.0, e4=0.7)
    made = plan([near, far], [there(), there()], LIMITS, now=0.0)
    assert [guess.expert for guess in made.send] == [ExpertId(1, 3), ExpertId(2, 4), ExpertId(1, 0)]
    assert [guess.deadline for guess in made.send] == [5.0, 10.0, 5.0]


def test_of_equals_the_sooner_goes_first() -> None:
    made = plan([forecast(2, 9.0, e1=0.5), forecast(1, 5.0, e1=0.5)], [there(), there()], LIMITS, now=0.0)
    assert [guess.expert.layer for guess in made.send] == [1, 2]


def test_what_cannot_begin_before_its_layer_comes_is_left_out() -> None:
    made = plan([forecast(1, 1.5, e0=0.9, e1=0.8, e2=0.7)], [there()], LIMITS, now=0.0)
    assert [guess.expert.expert for guess in made.send] == [0, 1]  # the third would begin at 2 s
    far = forecast(2, 3.5, e0=0.6)  # behind the two of layer 1 it begins at 2 s
    made = plan([forecast(1, 1.5, e0=0.9, e1=0.8), far], [there(), there()], LIMITS, now=0.0)
    assert len(made.send) == 3
    assert plan([far], [there()], LIMITS, now=3.5).send == ()


def test_a_block_due_later_does_not_stand_in_the_way_of_one_due_sooner() -> None:
    made = plan([forecast(3, 9.0, e0=0.9, e1=0.9), forecast(1, 0.5, e0=0.5)], [there(), there()], LIMITS, now=0.0)
    assert ExpertId(1, 0) in [guess.expert for guess in made.send]


def test_what_is_there_is_protected_and_not_sent() -> None:
    made = plan([forecast(2, 2.0, e1=0.8, e2=0.6)], [there(1)], LIMITS, now=0.0)
    assert [guess.expert for guess in made.send] == [ExpertId(2, 2)]
    assert set(made.protect) == {ExpertId(2, 1), ExpertId(2, 2)}


def test_the_unlikely_are_neither_sent_nor_protected() -> None:
    made = plan([forecast(2, 2.0, e1=0.19, e2=0.19)], [there(2)], LIMITS, now=0.0)
    assert made.send == () and made.protect == ()


def test_no_more_than_the_limit_is_sent() -> None:
    made = plan([forecast(1, 50.0, e0=0.5, e1=0.6, e2=0.7, e3=0.8)], [there()], LIMITS, now=0.0)
    assert [guess.expert.expert for guess in made.send] == [3, 2, 1]
