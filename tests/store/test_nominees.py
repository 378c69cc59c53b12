"""Victims chosen ahead, experts that are spared, transients that linger: what the slot table offers to a GPU."""

from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Belady, ForecastAware, Lfru, Lru, Policy, Reuse, make_policy
from steerpipe.store.residency import Residency, SlotTable

COUNT = 12
EXPERTS = [ExpertId(0, number) for number in range(COUNT)]


def table_of(slots: int, policy: Policy | None = None, limit: int = 2, *, lingers: bool = True) -> SlotTable:
    return SlotTable(EXPERTS, slots, policy or Lru(COUNT), limit, lingers=lingers)


def bring(table: SlotTable, number: int, now: float, *, transient: bool = False) -> int | None:
    """Who went for it."""
    placement = table.begin(EXPERTS[number], transient=transient, now=now)
    assert placement is not None
    table.finish(EXPERTS[number])
    return None if placement.evicted is None else placement.evicted.expert


def policies() -> list[Policy]:
    random = Random(3)
    future = sorted((random.random() * 50, random.randrange(COUNT)) for _ in range(60))
    aware = ForecastAware(COUNT)
    aware.forecast(np.array([2, 5, 7]), np.array([30.0, np.inf, 9.0]))
    told = Reuse(COUNT)
    told.expect(np.arange(COUNT) % 5 - 2.0, 0.0)
    return [Lru(COUNT), Lfru(COUNT), aware, told, Belady(COUNT, [(number, time) for time, number in future])]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: type(policy).__name__)
def test_victims_are_those_that_would_be_named_one_after_the_other(policy: Policy) -> None:
    for now, number in enumerate([3, 3, 1, 8, 2, 2, 9, 3, 0]):
        policy.touch(number, now)
    left = np.array([0, 1, 2, 3, 5, 8, 9, 11])
    expected = []
    while left.size:
        expected.append(policy.victim(left, 10))
        left = left[left != expected[-1]]
    for count in (1, 3, 8, 20):
        assert policy.victims(np.array([0, 1, 2, 3, 5, 8, 9, 11]), count, 10) == expected[:count]


@pytest.mark.parametrize("name", ["lru", "lfru", "forecast", "reuse"])
def test_uses_at_once_count_as_uses_one_by_one(name: str) -> None:
    one, other = make_policy(name, COUNT), make_policy(name, COUNT)
    random = Random(1)
    for now in range(40):
        used = random.sample(range(COUNT), 4)
        one.touch_many(used, now)
        for number in used:
            other.touch(number, now)
        everyone = np.arange(COUNT)
        assert one.victims(everyone, COUNT, now) == other.victims(everyone, COUNT, now)


@given(
    st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, 3), st.booleans()), max_size=60),
    st.sampled_from(["lru", "lfru"]),
)
@example([(number, 0, False) for number in (0, 9, 0, 0, 1, 2, 3)] + [(8, 1, False)], "lfru")  # used, and still the next
def test_nominating_changes_no_decision(steps: list[tuple[int, int, bool]], name: str) -> None:
    plain, ahead = (table_of(5, make_policy(name, COUNT)) for _ in range(2))
    for now, (number, count, use_only) in enumerate(steps):
        if count:  # else those of an earlier step are left
            ahead.nominate(2 * count, now)
        for table in (plain, ahead):
            table.touch_many([number, (number + 1) % COUNT], now)
        if not use_only and plain.state(EXPERTS[number]) is Residency.ABSENT:
            assert bring(plain, number, now) == bring(ahead, number, now)
        plain.check_integrity()
        ahead.check_integrity()


def test_the_spared_stay_as_if_they_were_pinned() -> None:
    table = table_of(3)
    for number in range(3):
        bring(table, number, 0)
    table.nominate(3, 1)
    placement = table.begin(EXPERTS[5], transient=False, now=1, sparing=[0, 1])
    assert placement is not None and placement.evicted == EXPERTS[2]
    assert table.begin(EXPERTS[6], transient=False, now=1, sparing=[0, 1]) is None
    table.check_integrity()


def test_a_transient_expert_lingers_and_goes_first_the_oldest_before_others() -> None:
    table = table_of(4)
    bring(table, 0, 0)
    bring(table, 1, 0)
    for number in (7, 4):
        bring(table, number, 1, transient=True)
        table.pin(EXPERTS[number])
        table.unpin(EXPERTS[number])
    assert list(table.lingering) == [7, 4]
    assert table.state(EXPERTS[7]) is Residency.READY
    assert bring(table, 9, 2) == 7
    assert bring(table, 10, 2) == 4
    assert bring(table, 11, 2) == 0
    table.check_integrity()


def test_at_the_limit_a_transient_expert_takes_the_place_of_one_that_lingers() -> None:
    table = table_of(6, limit=2)
    for number in (3, 4):
        bring(table, number, 0, transient=True)
    assert bring(table, 5, 0, transient=True) == 3
    assert table.transients == 2 and table.free_slots == 4
    table.pin(EXPERTS[4])
    table.pin(EXPERTS[5])
    assert table.begin(EXPERTS[6], transient=True, now=0) is None
    table.check_integrity()


def test_one_that_is_promoted_lingers_no_more() -> None:
    table = table_of(2)
    bring(table, 0, 0, transient=True)
    bring(table, 1, 0)
    table.touch(EXPERTS[0], 5)
    table.promote(EXPERTS[0])
    assert not table.lingering
    assert bring(table, 2, 6) == 1
    table.check_integrity()


def test_what_is_protected_does_not_go_though_it_lingers_or_was_nominated() -> None:
    table = table_of(3)
    bring(table, 0, 0, transient=True)
    bring(table, 1, 1)
    bring(table, 2, 2)
    table.nominate(2, 2)
    table.protect([EXPERTS[0], EXPERTS[1]])
    assert bring(table, 5, 3) == 2
    table.check_integrity()


def test_one_that_came_meanwhile_goes_before_a_nominee_that_was_used_more() -> None:
    table = table_of(3, Lfru(COUNT))
    for number in range(3):
        bring(table, number, 0)
        for _ in range(5):
            table.touch_many([number], 0)
    table.nominate(3, 1)
    table.touch_many([5], 1)
    assert bring(table, 5, 1) == 0
    table.touch_many([6], 1)
    assert bring(table, 6, 1) == 5
