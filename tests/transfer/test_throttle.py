"""Guesses are sent while enough of them are used, and tried again after a rest."""

import math

from steerpipe.transfer.throttle import ENOUGH_SENT, FIRST_REST, LONGEST_REST, MOST_SILENT, Throttle


def refused(throttle: Throttle) -> int:
    """How often it says no until the next yes."""
    count = 0
    while not throttle.allows():
        count += 1
    return count


def test_nothing_is_decided_before_enough_was_sent() -> None:
    throttle = Throttle()
    throttle.settle(ENOUGH_SENT - 1, 0)
    assert throttle.allows() and not throttle.closed


def test_guesses_that_are_used_go_on() -> None:
    throttle = Throttle(least_used=0.5)
    for _ in range(100):
        throttle.settle(2, 1)
        assert throttle.allows()


def test_wrong_guesses_end_and_are_tried_again_after_a_rest_that_doubles() -> None:
    throttle = Throttle()
    for rest in (FIRST_REST, 2 * FIRST_REST):
        throttle.settle(ENOUGH_SENT, 0)
        assert not throttle.allows() and throttle.closed
        assert refused(throttle) == rest


def test_a_predictor_that_turns_bad_is_found_out() -> None:
    throttle = Throttle()
    throttle.settle(10 * ENOUGH_SENT, 10 * ENOUGH_SENT)
    sent = 0
    while throttle.allows():
        throttle.settle(1, 0)
        sent += 1
    assert sent < 10 * ENOUGH_SENT, "what was right long ago counts less"


def test_who_sends_for_nobody_rests_and_is_tried_again_after_a_rest_that_doubles() -> None:
    throttle, first = Throttle(), 1  # the answer that ends a rest is a forecast as well
    for rest in (FIRST_REST, 2 * FIRST_REST):
        assert all(throttle.allows() for _ in range(first, MOST_SILENT + 1)), "not before so many forecasts"
        assert not throttle.allows() and throttle.closed
        assert refused(throttle) == rest
        first = 2


def test_any_guess_ends_the_silence() -> None:
    throttle = Throttle()
    for _ in range(5):
        assert all(throttle.allows() for _ in range(MOST_SILENT))
        throttle.settle(1, 1)
    assert throttle.allows()


def test_rests_are_short_again_when_enough_guesses_were_used() -> None:
    throttle = Throttle()
    while refused(throttle) < LONGEST_REST:
        pass  # silent for long: all that it names is there
    throttle.settle(ENOUGH_SENT - 1, ENOUGH_SENT - 1)
    throttle.settle(1, 0)
    while throttle.allows():
        pass
    assert refused(throttle) == FIRST_REST


def test_a_few_that_are_used_by_chance_do_not_shorten_rests() -> None:
    throttle, rests = Throttle(), []
    while len(rests) < 3:
        throttle.settle(2, 1)
        throttle.settle(ENOUGH_SENT - 2, 0)
        assert not throttle.allows()
        rests.append(refused(throttle))
    assert rests == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]


def test_silence_may_be_free() -> None:
    throttle = Throttle(most_silent=math.inf)
    assert all(throttle.allows() for _ in range(10 * MOST_SILENT))
