"""Guesses are sent while enough of them are used, and tried again after a rest."""

from steerpipe.transfer.throttle import ENOUGH_SENT, FIRST_REST, Throttle


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
        refused = 0
        while not throttle.allows():
            refused += 1
        assert refused == rest


def test_a_predictor_that_turns_bad_is_found_out() -> None:
    throttle = Throttle()
    throttle.settle(10 * ENOUGH_SENT, 10 * ENOUGH_SENT)
    sent = 0
    while throttle.allows():
        throttle.settle(1, 0)
        sent += 1
    assert sent < 10 * ENOUGH_SENT, "what was right long ago counts less"
