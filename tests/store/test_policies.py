"""Who is evicted first."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError
from steerpipe.store.policies import (
    LEAST_COUNT,
    POLICIES,
    Belady,
    ForecastAware,
    Lfru,
    Lru,
    Policy,
    Reuse,
    make_policy,
)

ALL = np.arange(4)


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("policy", [Lru(4), Lfru(4), ForecastAware(4), Reuse(4), Belady(4, [])])
def test_of_equals_the_lowest_number_goes(policy: Policy) -> None:
    assert policy.victim(numbers(1, 2, 3), 0.0) == 1


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = Lru(4)
    for now, number in enumerate((3, 1, 0, 2, 3)):
        policy.touch(number, float(now))
    assert policy.victim(ALL, 5.0) == 1
    assert policy.victim(numbers(0, 2, 3), 5.0) == 0


def test_lru_evicts_what_was_never_used_before_what_was() -> None:
    policy = Lru(4)
    policy.touch(0, 0.0)
    assert policy.victim(numbers(0, 3), 1.0) == 3


def test_lfru_evicts_what_is_used_less_often() -> None:
    policy = Lfru(4)
    for now, number in enumerate((0, 0, 0, 1)):
        policy.touch(number, float(now))
    assert policy.victim(numbers(0, 1), 4.0) == 1


def test_lfru_forgets_by_halves() -> None:
    policy = Lfru(2, half_life_tokens=10.0)
    for _ in range(4):
        policy.touch(0, 0.0)
    policy.touch(1, 19.0)  # 4 uses weigh 4 * 2 ** -1.9 = 1.07 by then
    assert policy.victim(numbers(0, 1), 19.0) == 1
    policy.touch(0, 0.0)
    policy.touch(1, 21.0)
    assert policy.victim(numbers(0, 1), 21.0) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 50)), max_size=40), st.floats(1, 100))
def test_lfru_counts_are_the_decayed_sum(uses: list[tuple[int, float]], half_life: float) -> None:
    policy, now, times = Lfru(3, half_life), 0.0, []
    for number, step in uses:
        now += step
        policy.touch(number, now)
        times.append((number, now))
    expected = [sum(2 ** ((time - now) / half_life) for each, time in times if each == number) for number in range(3)]
    assert policy.counts(now) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_lfru_neither_overflows_nor_forgets_the_order_after_a_billion_tokens() -> None:
    policy = Lfru(2, half_life_tokens=8.0)
    for now in (0.0, 1e9, 1e9 + 1, 1e9 + 2):
        policy.touch(0, now)
    policy.touch(1, 1e9 + 2)
    assert policy.victim(numbers(0, 1), 1e9 + 3) == 1
    assert policy.counts(1e9 + 2)[1] == 1.0


def test_lfru_counts_survive_a_restart() -> None:
    before, after = Lfru(3), Lfru(3)
    for now, number in enumerate((0, 1, 1, 0, 1)):
        before.touch(number, float(now))
    after.restore(before.counts(4.0), now=0.0)
    assert after.counts(0.0) == pytest.approx(before.counts(4.0))
    assert after.counts(0.0)[2] == 0.0
    assert after.victim(numbers(0, 1), 0.0) == 0


def test_lfru_expects_a_steady_expert_when_its_rate_says() -> None:
    policy = Lfru(2)
    for now in range(0, 4000, 5):
        policy.touch(0, float(now))
    expected = policy.expected_use(numbers(0, 1), 4000.0)
    assert expected[0] - 4000.0 == pytest.approx(5.0, rel=0.1)
    assert expected[1] > 1e100  # never used: not in sight, but a number


def test_a_forecast_outranks_the_past() -> None:
    policy = ForecastAware(3)
    for now in range(8):
        policy.touch(0, float(now))
    policy.touch(1, 7.0)
    assert policy.victim(numbers(0, 1), 8.0) == 1
    policy.forecast(numbers(0, 1), np.array([math.inf, 9.0]))
    assert policy.victim(numbers(0, 1), 8.0) == 0


def test_a_forecast_ends_with_the_use_or_with_its_time() -> None:
    used, passed = ForecastAware(2), ForecastAware(2)
    for policy in (used, passed):
        for now in range(8):
            policy.touch(0, float(now))
        policy.touch(1, 7.0)
    used.forecast(numbers(0), np.array([math.inf]))
    used.touch(0, 8.0)
    passed.forecast(numbers(1), np.array([9.0]))
    assert passed.victim(numbers(0, 1), 8.0) == 0
    assert passed.victim(numbers(0, 1), 10.0) == 1
    assert used.victim(numbers(0, 1), 8.0) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9)), max_size=40))
def test_reuse_that_nobody_tells_anything_is_lfru(uses: list[tuple[int, float]]) -> None:
    reuse, lfru, now = Reuse(4), Lfru(4), 0.0
    for number, step in uses:
        now += step
        reuse.touch(number, now)
        lfru.touch(number, now)
        assert reuse.victims(ALL, 4, now) == lfru.victims(ALL, 4, now)
        assert reuse.counts(now) == pytest.approx(lfru.counts(now))


def test_reuse_adds_what_it_is_told_to_the_log_of_the_count() -> None:
    policy = Reuse(3)
    for _ in range(4):
        policy.touch(0, 8.0)
    policy.touch(1, 8.0)
    assert policy.victim(numbers(0, 1), 8.0) == 1
    policy.expect(np.array([0.0, 1.5, 0.0]), 8.0)  # 4 uses are 2 doublings of 1
    assert policy.victim(numbers(0, 1), 8.0) == 1
    policy.expect(np.array([0.0, 2.5, 0.0]), 8.0)
    assert policy.victim(numbers(0, 1), 8.0) == 0
    expected = np.log2(np.array([4.0, 1.0, 0.0]) + LEAST_COUNT) + np.array([0.0, 2.5, 0.0])
    assert policy.scores(numbers(0, 1, 2), 8.0) == pytest.approx(expected)


def test_reuse_hears_of_uses_between_forecasts() -> None:
    policy = Reuse(2)
    policy.expect(np.array([1.0, 0.0]), 0.0)
    assert policy.victim(numbers(0, 1), 0.0) == 1
    policy.touch_many([1], 0.5)
    assert policy.victim(numbers(0, 1), 0.5) == 0


def test_reuse_forgets_what_it_was_told_of_another_text() -> None:
    policy = Reuse(2)
    policy.touch(1, 0.0)
    policy.expect(np.array([9.0, 0.0]), 0.0)
    assert policy.victim(numbers(0, 1), 1.0) == 1
    policy.forget()
    assert policy.victim(numbers(0, 1), 1.0) == 0


def test_belady_evicts_what_is_used_last_or_never() -> None:
    policy = Belady(4, [(0, 1.0), (1, 2.0), (0, 3.0), (2, 4.0), (1, 9.0)])
    assert policy.victim(numbers(0, 1, 2), 0.0) == 2
    assert policy.victim(ALL, 0.0) == 3
    for now, number in ((1.0, 0), (2.0, 1)):
        policy.touch(number, now)
    assert policy.victim(numbers(0, 1, 2), 2.0) == 1
    policy.touch(0, 3.0)
    assert policy.victim(numbers(0, 1, 2), 3.0) == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(2, 4))
def test_no_policy_misses_less_than_belady(uses: list[int], slots: int) -> None:
    future = [(number, float(now)) for now, number in enumerate(uses)]
    missed = {name: misses(make_policy(name, 6, uses=future), uses, slots) for name in POLICIES}
    assert missed["belady"] == min(missed.values())


def misses(policy: Policy, uses: list[int], slots: int) -> int:
    held: set[int] = set()
    count = 0
    for now, number in enumerate(uses):
        if number not in held:
            count += 1
            if len(held) == slots:
                held.remove(policy.victim(numbers(*sorted(held)), float(now)))
            held.add(number)
        policy.touch(number, float(now))
    return count


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'arc' is not an eviction policy") as caught:
        make_policy("arc", 4)
    assert all(name in caught.value.fix for name in POLICIES)


def test_belady_without_a_future_and_a_half_life_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs the future"):
        make_policy("belady", 4)
    with pytest.raises(ConfigError, match="half-life of 0"):
        make_policy("lfru", 4, half_life_tokens=0)
