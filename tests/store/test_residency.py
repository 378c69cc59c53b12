"""The slot table: three states, pins, transient experts, and what may be evicted."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Lfru, Lru
from steerpipe.store.residency import Placement, Residency, SlotTable

EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(4)]
A, B, C, D = EXPERTS[:4]


def make_table(slots: int = 2, transient_limit: int = 1) -> SlotTable:
    return SlotTable(EXPERTS, slots, Lru(len(EXPERTS)), transient_limit)


def load(table: SlotTable, expert: ExpertId, now: float = 0.0, *, transient: bool = False) -> Placement:
    placement = table.begin(expert, transient=transient, now=now)
    assert placement is not None
    table.touch(expert, now)
    table.finish(expert)
    return placement


def test_an_expert_goes_from_absent_over_loading_to_ready() -> None:
    table = make_table()
    assert table.state(A) is Residency.ABSENT
    placement = table.begin(A, transient=False, now=0.0)
    assert placement == Placement(slot=0, evicted=None)
    assert table.state(A) is Residency.LOADING
    assert table.slot(A) == 0
    assert table.ready([A, B]) == []
    table.finish(A)
    assert table.state(A) is Residency.READY
    assert table.ready([B, A]) == [A] == table.resident()


def test_free_slots_are_used_before_anybody_is_evicted() -> None:
    table = make_table(slots=3)
    assert [load(table, expert).slot for expert in (A, B, C)] == [0, 1, 2]
    assert table.free_slots == 0
    assert table.resident() == [A, B, C]


def test_the_policys_victim_gives_its_slot() -> None:
    table = make_table()
    load(table, A, now=0.0)
    load(table, B, now=1.0)
    table.touch(A, 2.0)
    assert table.begin(C, transient=False, now=3.0) == Placement(slot=1, evicted=B)
    assert table.state(B) is Residency.ABSENT


def test_what_is_pinned_or_loading_is_never_a_victim() -> None:
    table = make_table()
    load(table, A)
    table.pin(A)
    table.begin(B, transient=False, now=0.0)
    assert table.begin(C, transient=False, now=0.0) is None
    assert table.state(C) is Residency.ABSENT
    table.unpin(A)
    assert table.begin(C, transient=False, now=0.0) == Placement(slot=0, evicted=A)


def test_pins_are_counted() -> None:
    table = make_table()
    load(table, A)
    load(table, B)
    table.pin(B)
    table.pin(A)
    table.pin(A)
    table.unpin(A)
    assert table.pins(A) == 1
    assert table.begin(C, transient=False, now=1.0) is None
    table.unpin(A)
    assert table.begin(C, transient=False, now=1.0) == Placement(slot=0, evicted=A)


def test_an_abandoned_load_leaves_a_free_slot() -> None:
    table = make_table()
    load(table, A)
    table.begin(B, transient=True, now=0.0)
    table.abandon(B)
    assert (table.state(B), table.free_slots, table.transients) == (Residency.ABSENT, 1, 0)
    assert table.begin(C, transient=True, now=0.0) == Placement(slot=1, evicted=None)
    table.check_integrity()


def test_a_transient_expert_leaves_at_its_last_unpin() -> None:
    table = make_table()
    table.begin(A, transient=True, now=0.0)
    table.pin(A)
    table.pin(A)
    table.finish(A)
    table.unpin(A)
    assert table.state(A) is Residency.READY
    table.unpin(A)
    assert (table.state(A), table.free_slots) == (Residency.ABSENT, 2)


def test_a_transient_expert_that_is_let_go_while_loading_keeps_its_slot_until_it_is_wanted() -> None:
    table = make_table()
    table.begin(A, transient=True, now=0.0)
    table.pin(A)
    table.unpin(A)
    assert table.state(A) is Residency.LOADING
    table.finish(A)
    assert table.state(A) is Residency.READY
    assert table.begin(B, transient=True, now=0.0) == Placement(slot=0, evicted=A)  # also at the limit of one


def test_no_more_transient_experts_than_the_limit_hold_slots() -> None:
    table = make_table(slots=4, transient_limit=2)
    for expert in (A, B):
        table.begin(expert, transient=True, now=0.0)
    assert table.begin(C, transient=True, now=0.0) is None
    assert table.begin(C, transient=False, now=0.0) is not None
    table.promote(A)
    table.promote(A)
    assert table.transients == 1
    assert table.begin(D, transient=True, now=0.0) is not None


def test_a_prompt_evicts_no_more_than_its_transient_experts() -> None:
    table = make_table(slots=4, transient_limit=1)
    for expert in EXPERTS[:4]:
        load(table, expert)
    for expert in EXPERTS[4:]:
        load(table, expert, transient=True)
        table.pin(expert)
        table.unpin(expert)
    assert len(table.resident()) == 3


def test_at_the_limit_a_transient_expert_replaces_a_transient_one() -> None:
    table = make_table(slots=2, transient_limit=1)
    load(table, A, now=0.0)
    load(table, B, now=5.0, transient=True)
    assert table.begin(C, transient=True, now=6.0) == Placement(slot=1, evicted=B)  # though A was used before
    assert table.begin(D, transient=True, now=6.0) is None


def test_a_promoted_expert_stays_after_its_last_unpin() -> None:
    table = make_table()
    load(table, A, transient=True)
    table.pin(A)
    table.promote(A)
    table.unpin(A)
    assert table.state(A) is Residency.READY


def test_what_is_protected_goes_last_and_never_for_a_guess() -> None:
    table = make_table()
    load(table, A, now=0.0)
    load(table, B, now=1.0)
    table.protect([A])
    assert table.begin(C, transient=False, now=2.0, speculative=True) == Placement(slot=1, evicted=B)
    table.finish(C)
    table.touch(C, 2.0)
    table.protect([A, C, D])
    assert table.begin(B, transient=False, now=2.0, speculative=True) is None
    assert table.begin(B, transient=False, now=2.0) == Placement(slot=0, evicted=A)  # a demand must go on


def test_protection_ends_with_the_next_call() -> None:
    table = make_table()
    load(table, A, now=0.0)
    load(table, B, now=1.0)
    table.protect([A])
    table.protect([])
    placement = table.begin(C, transient=False, now=2.0)
    assert placement is not None
    assert placement.evicted == A


def test_what_was_evicted_keeps_its_past() -> None:
    table = SlotTable(EXPERTS, 2, Lfru(len(EXPERTS)), 1)
    for now in range(8):
        table.touch(A, float(now))  # often used, though without a slot
    load(table, A, now=8.0)
    load(table, B, now=9.0)
    placement = table.begin(C, transient=False, now=10.0)
    assert placement is not None
    assert placement.evicted == B


@pytest.mark.parametrize("misuse", [
    lambda table: table.begin(A, transient=False, now=0.0),
    lambda table: table.finish(A),
    lambda table: table.abandon(A),
    lambda table: table.unpin(A),
    lambda table: table.finish(C),
    lambda table: table.pin(C),
    lambda table: table.slot(C),
    lambda table: table.promote(C),
    lambda table: table.state(ExpertId(9, 9)),
])  # fmt: skip
def test_a_call_that_does_not_fit_the_state_is_refused(misuse) -> None:  # type: ignore[no-untyped-def]
    table = make_table()
    load(table, A)
    with pytest.raises(AssertionError):
        misuse(table)
    table.check_integrity()


def test_a_pinned_load_is_not_abandoned_over_its_holders_head() -> None:
    table = make_table()
    table.begin(A, transient=False, now=0.0)
    table.pin(A)
    with pytest.raises(AssertionError, match="1 pins"):
        table.abandon(A)


def test_a_table_needs_two_slots_one_transient_and_distinct_experts() -> None:
    for experts, slots, limit in ((EXPERTS, 1, 1), (EXPERTS, 2, 0), ([A, A], 2, 1)):
        with pytest.raises(AssertionError):
            SlotTable(experts, slots, Lru(len(experts)), limit)


class TableMachine(RuleBasedStateMachine):
    """Any order of legal calls, against a plain dictionary."""

    @initialize(slots=st.integers(2, 6), limit=st.integers(1, 3), frequent=st.booleans())
    def start(self, slots: int, limit: int, frequent: bool) -> None:
        policy = Lfru(len(EXPERTS)) if frequent else Lru(len(EXPERTS))
        self.table = SlotTable(EXPERTS, slots, policy, limit)
        self.slots, self.limit, self.now = slots, limit, 0.0
        self.slot: dict[ExpertId, int] = {}
        self.loading: set[ExpertId] = set()
        self.transient: set[ExpertId] = set()
        self.pins: dict[ExpertId, int] = {}
        self.protected: set[ExpertId] = set()

    def idle(self) -> set[ExpertId]:
        return {e for e in self.slot if e not in self.loading and not self.pins.get(e)}

    def pick(self, index: int, among: set[ExpertId]) -> ExpertId:
        return sorted(among)[index % len(among)]

    def forget(self, expert: ExpertId) -> None:
        del self.slot[expert]
        self.transient.discard(expert)
        self.loading.discard(expert)

    @rule(index=st.integers(0, 7), transient=st.booleans(), speculative=st.booleans())
    @precondition(lambda self: len(self.slot) < len(EXPERTS))
    def begin(self, index: int, transient: bool, speculative: bool) -> None:
        expert = self.pick(index, set(EXPERTS) - self.slot.keys())
        full = transient and len(self.transient) == self.limit
        victims = self.idle() & self.transient if full else self.idle()
        victims -= self.protected if speculative or victims - self.protected else set()
        free = len(self.slot) < self.slots and not full
        placement = self.table.begin(expert, transient=transient, now=self.now, speculative=speculative)
        assert (placement is None) == (not free and not victims)
        if placement is None:
            return
        assert (placement.evicted is None) == free
        if placement.evicted is not None:
            assert placement.evicted in victims
            assert self.slot[placement.evicted] == placement.slot
            self.forget(placement.evicted)
        self.slot[expert] = placement.slot
        self.loading.add(expert)
        self.transient |= {expert} if transient else set()

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.loading)
    def finish(self, index: int) -> None:
        expert = self.pick(index, self.loading)
        self.table.finish(expert)
        self.loading.remove(expert)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: any(not self.pins.get(e) for e in self.loading))
    def abandon(self, index: int) -> None:
        expert = self.pick(index, {e for e in self.loading if not self.pins.get(e)})
        self.table.abandon(expert)
        self.forget(expert)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.slot)
    def pin(self, index: int) -> None:
        expert = self.pick(index, set(self.slot))
        self.table.pin(expert)
        self.pins[expert] = self.pins.get(expert, 0) + 1

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: any(self.pins.values()))
    def unpin(self, index: int) -> None:
        expert = self.pick(index, {e for e, count in self.pins.items() if count})
        self.table.unpin(expert)
        self.pins[expert] -= 1
        if not self.pins[expert] and expert not in self.loading and expert in self.transient:
            self.forget(expert)

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.slot)
    def promote(self, index: int) -> None:
        expert = self.pick(index, set(self.slot))
        self.table.promote(expert)
        self.transient.discard(expert)

    @rule(expert=st.sampled_from(EXPERTS), step=st.floats(0, 64))
    def touch(self, expert: ExpertId, step: float) -> None:
        self.now += step
        self.table.touch(expert, self.now)

    @rule(experts=st.sets(st.sampled_from(EXPERTS)))
    def protect(self, experts: set[ExpertId]) -> None:
        self.table.protect(experts)
        self.protected = experts

    @invariant()
    def the_table_agrees_with_the_dictionary(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        assert self.table.free_slots == self.slots - len(self.slot) >= 0
        assert self.table.transients == len(self.transient) <= self.limit
        for expert in EXPERTS:
            held = Residency.LOADING if expert in self.loading else Residency.READY
            assert self.table.state(expert) is (held if expert in self.slot else Residency.ABSENT)
            assert self.table.pins(expert) == self.pins.get(expert, 0)
        assert {expert: self.table.slot(expert) for expert in self.slot} == self.slot


TestTable = TableMachine.TestCase
