"""Debouncing and typing speed, as functions of times alone."""

import math

import pytest

from steerpipe.intake.pauses import SPECULATIVE_ENTER, Debounce, TypingPace, before_enter


def test_it_is_time_when_nothing_was_typed_for_a_while() -> None:
    wait = Debounce(0.25)
    assert wait.seconds_left(10.0, 10.0, now=10.1) == pytest.approx(0.15)
    assert wait.seconds_left(10.0, 10.2, now=10.25) == pytest.approx(0.2)  # each key starts the wait anew
    assert wait.seconds_left(10.0, 10.2, now=10.45) == 0.0
    assert wait.seconds_left(10.0, 10.2, now=99.0) == 0.0


def test_a_person_who_never_pauses_is_not_waited_for_for_ever() -> None:
    wait = Debounce(0.25, longest_seconds=1.0)
    assert wait.seconds_left(10.0, 10.95, now=10.95) == pytest.approx(0.05)
    assert wait.seconds_left(10.0, 10.99, now=11.0) == 0.0


def test_the_speculative_enter_waits_a_quarter_of_a_second() -> None:
    assert SPECULATIVE_ENTER.quiet_seconds == 0.25 and SPECULATIVE_ENTER.longest_seconds == math.inf


def test_a_steady_typist_has_the_speed_of_the_keys() -> None:
    pace = TypingPace()
    assert pace.tokens_per_second(4.0) is None
    for _ in range(400):
        pace = pace.after(0.2, 1)
    assert pace.tokens_per_second(4.0) == pytest.approx(5 / 4)


def test_thinking_counts_as_two_seconds_and_deleting_against() -> None:
    pace = TypingPace().after(600.0, 1)
    assert pace.seconds == 2.0
    for _ in range(10):
        pace = pace.after(0.1, 1)
    typed = pace.characters
    assert pace.after(0.1, -1).characters < typed and TypingPace().after(1.0, -5).characters == 0.0


def test_the_last_minutes_count_most() -> None:
    pace = TypingPace()
    for _ in range(600):
        pace = pace.after(1.0, 1)
    for _ in range(3000):
        pace = pace.after(0.1, 1)
    rate = pace.tokens_per_second(1.0)
    assert rate is not None and 9 < rate <= 10.0


@pytest.mark.parametrize(
    ("end", "seconds"), [("me?", 0.03), ("Done. ", 0.03), ("日本。", 0.03), ("me", 0.25), ("3.5", 0.25), ("", 0.25)]
)
def test_a_text_that_ends_with_a_sentence_is_taken_as_complete_sooner(end: str, seconds: float) -> None:
    assert before_enter(end).quiet_seconds == seconds
