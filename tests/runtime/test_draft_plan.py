"""Which experts are fetched for an answer that may begin: what they displace is worth less."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steerpipe.runtime.draft_plan import LEAST_USES, plan_opening

NONE = np.zeros(6)


def there(*numbers: int) -> np.ndarray:
    return np.isin(np.arange(6), numbers)


def test_an_empty_cache_is_filled_with_what_is_expected_most() -> None:
    rates = np.array([0.1, 0.9, 0.0, 0.5, 0.7, 0.2])
    plan = plan_opening(rates, NONE, there(), slots=3)
    assert plan.send.tolist() == [1, 4, 3]


def test_what_is_hardly_expected_is_not_worth_a_transfer() -> None:
    plan = plan_opening(np.full(6, 0.9 * LEAST_USES / 16), NONE, there(), slots=6)
    assert not len(plan.send)


def test_what_the_last_answer_used_stays_though_something_else_is_guessed() -> None:
    """The counts share out 1.2 uses per token as 0.6 and 0.6, the forecast as four times 0.3."""
    counts = np.array([5.0, 5.0, 0, 0, 0, 0])
    plan = plan_opening(np.array([0, 0, 0.3, 0.3, 0.3, 0.3]), counts, there(0, 1), slots=2)
    assert not len(plan.send) and sorted(plan.keep.tolist()) == [0, 1]


def test_a_guess_takes_the_place_of_what_is_worth_clearly_less() -> None:
    counts = np.array([1.0, 9.0, 0, 0, 0, 0])
    plan = plan_opening(np.array([0, 0, 0.9, 0.1, 0, 0]), counts, there(0, 1), slots=2)
    assert plan.send.tolist() == [2] and plan.keep.tolist() == [1]


def test_a_guess_that_is_worth_little_more_displaces_nothing() -> None:
    """Two experts in slots share out what three are expected to use: worth 0.5 each, against 0.55 and then 0.7."""
    counts = np.array([5.0, 5.0, 0, 0, 0, 0])
    assert not len(plan_opening(np.array([0, 0, 0.55, 0.45, 0, 0]), counts, there(0, 1), slots=2).send)
    assert len(plan_opening(np.array([0, 0, 0.7, 0.3, 0, 0]), counts, there(0, 1), slots=2).send) == 1


@given(
    arrays(np.float64, 12, elements=st.floats(0, 1)), arrays(np.float64, 12, elements=st.floats(0, 40)),
    arrays(np.bool_, 12), st.integers(2, 12),
)  # fmt: skip
def test_a_plan_never_asks_for_more_than_there_is_room_for(
    rates: np.ndarray, counts: np.ndarray, present: np.ndarray, slots: int
) -> None:
    present &= np.cumsum(present) <= slots
    plan = plan_opening(rates, counts, present, slots)
    assert not present[plan.send].any() and present[plan.keep].all()
    assert len(plan.send) + len(plan.keep) <= slots
    assert len(set(plan.send.tolist())) == len(plan.send)
