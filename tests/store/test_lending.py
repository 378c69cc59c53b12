"""Slots that are lent: without an owner, until an expert adopts them or they are given back."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.ids import ExpertId
from steerpipe.store.lending import LendingTable
from steerpipe.store.policies import Lru
from steerpipe.store.residency import Placement, Residency

EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(4)]
A, B, C, D = EXPERTS[:4]


def make_table(slots: int = 3) -> LendingTable:
    return LendingTable(EXPERTS, slots, Lru(len(EXPERTS)), 2, lingers=True)


def load(table: LendingTable, number: int, now: float = 0.0, *, transient: bool = False) -> None:
    assert table.begin(EXPERTS[number], transient=transient, now=now) is not None
    table.touch(EXPERTS[number], now)
    table.finish(EXPERTS[number])


def test_free_slots_are_lent_first_then_those_of_victims() -> None:
    table = make_table()
    load(table, 0)
    load(table, 1, now=1.0)
    assert table.reserve(2.0) == Placement(2, None)
    assert table.reserve(2.0) == Placement(0, A)
    assert table.state(A) is Residency.ABSENT
    assert sorted(table.reserved) == [0, 2]
    table.check_integrity()


def test_nobody_gets_a_slot_that_is_lent() -> None:
    table = make_table(2)
    table.reserve(0.0)
    table.reserve(0.0)
    assert table.reserve(0.0) is None
    assert table.begin(A, transient=False, now=0.0) is None
    table.check_integrity()


def test_those_that_are_spared_are_not_evicted() -> None:
    table = make_table(2)
    load(table, 0)
    load(table, 1, now=1.0)
    assert table.reserve(2.0, sparing=[0]) == Placement(1, B)
    assert table.reserve(2.0, sparing=[0]) is None
    assert table.reserve(2.0) == Placement(0, A)


def test_who_adopts_a_slot_is_ready_and_may_be_evicted() -> None:
    table = make_table(2)
    table.reserve(0.0)
    table.adopt(2, 0)
    assert table.state(C) is Residency.READY and table.slot(C) == 0 and not table.reserved
    table.check_integrity()
    load(table, 1, now=1.0)
    assert table.begin(D, transient=False, now=2.0) == Placement(0, C)


def test_an_adoption_leaves_the_nominees_alone() -> None:
    table = make_table(3)
    load(table, 0)
    load(table, 1, now=1.0)
    table.nominate(2, 2.0)
    place = table.reserve(2.0)
    assert place is not None
    table.adopt(5, place.slot)
    assert table.nominees == 2
    assert table.reserve(3.0) == Placement(0, A)


def test_what_was_done_may_be_done_again() -> None:
    table = make_table()
    table.reserve(0.0)
    table.reserve(0.0)
    for _ in range(2):
        table.adopt(2, 0)
        table.give_back(1)
        table.check_integrity()
    assert table.free_slots == 2


@pytest.mark.parametrize("slot", [1, 2])
def test_only_a_slot_that_is_lent_is_adopted(slot: int) -> None:
    table = make_table()
    load(table, 0)
    load(table, 1)
    with pytest.raises(AssertionError, match="not lent"):
        table.adopt(3, slot)


def test_an_expert_that_has_a_slot_adopts_no_other() -> None:
    table = make_table()
    load(table, 0)
    table.reserve(0.0)
    with pytest.raises(AssertionError, match="has a slot"):
        table.adopt(0, 1)


def test_a_table_is_mended_after_an_interrupt() -> None:
    table = make_table(4)
    load(table, 0)
    load(table, 1, transient=True)
    assert table.reserve(0.0) is not None
    lost = table.reserve(0.0)
    assert lost is not None
    table._held.pop(A)  # in the middle of an eviction
    table._reserved.add(0)
    table.mend([2])
    table.check_integrity()
    assert sorted(table.reserved) == [2] and table.free_slots == 2 and list(table.lingering) == [1]


class LendingMachine(RuleBasedStateMachine):
    """Any order of legal calls: `check_integrity` says that no slot has two owners."""

    @initialize(slots=st.integers(2, 6))
    def start(self, slots: int) -> None:
        self.table = make_table(slots)
        self.lent: list[int] = []
        self.now = 0.0

    def absent(self) -> list[int]:
        return [number for number, expert in enumerate(EXPERTS) if self.table.state(expert) is Residency.ABSENT]

    @rule(sparing=st.sets(st.integers(0, 7)))
    def reserve(self, sparing: set[int]) -> None:
        ready = {number for number, expert in enumerate(EXPERTS) if self.table.state(expert) is Residency.READY}
        free, self.now = self.table.free_slots, self.now + 1
        place = self.table.reserve(self.now, sparing)
        assert (place is None) == (not free and not ready - sparing)
        if place is not None:
            assert place.slot not in self.lent and (place.evicted is None) == bool(free)
            assert place.evicted is None or EXPERTS.index(place.evicted) in ready - sparing
            self.lent.append(place.slot)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.lent and self.absent())
    def adopt(self, index: int) -> None:
        number = self.absent()[index % len(self.absent())]
        self.table.adopt(number, self.lent.pop(0))
        self.table.touch_many([number], self.now)

    @rule()
    @precondition(lambda self: self.lent)
    def give_back(self) -> None:
        self.table.give_back(self.lent.pop())

    @rule(index=st.integers(0, 7), transient=st.booleans())
    @precondition(lambda self: self.absent())
    def load(self, index: int, transient: bool) -> None:
        expert = EXPERTS[self.absent()[index % len(self.absent())]]
        if self.table.begin(expert, transient=transient, now=self.now) is not None:
            self.table.finish(expert)

    @rule(count=st.integers(1, 4))
    def nominate(self, count: int) -> None:
        self.table.nominate(count, self.now)

    @invariant()
    def the_lent_slots_are_known(self) -> None:
        if hasattr(self, "table"):
            self.table.check_integrity()
            assert sorted(self.table.reserved) == sorted(self.lent)


TestLending = LendingMachine.TestCase


def test_what_is_vacated_is_under_the_limit_and_neither_spared_nor_protected() -> None:
    table = LendingTable(EXPERTS, 8, Lru(len(EXPERTS)), 3, lingers=True)
    for number in range(7):
        load(table, number, now=float(number), transient=number == 4)
    table.protect([EXPERTS[1]])
    assert table.vacate(4, 9.0, below=6, sparing={2}) == [
        Placement(4, EXPERTS[4]),  # lingers
        Placement(0, EXPERTS[0]),
        Placement(3, EXPERTS[3]),
    ]
    assert table.free_slots == 4
    table.check_integrity()
    assert table.vacate(4, 9.0, below=6, sparing=()) == [], "there are as many already"
