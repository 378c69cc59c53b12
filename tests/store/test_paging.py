"""Pages of slots: given away whole, at the cost of the least valuable experts, and back whole."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.ids import ExpertId
from steerpipe.store.paging import PagedLendingTable, PagedTable, Vacated
from steerpipe.store.policies import Lru
from steerpipe.store.residency import Residency

EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(6)]


def make_table(pages: int = 3, page_slots: int = 2) -> PagedTable:
    return PagedTable(EXPERTS, pages, page_slots, Lru(len(EXPERTS)), 2)


def load(table: PagedTable, *numbers: int, now: float = 0.0) -> None:
    for number in numbers:
        assert table.begin(EXPERTS[number], transient=False, now=now + number) is not None
        table.touch(EXPERTS[number], now + number)
        table.finish(EXPERTS[number])


def test_an_empty_page_goes_first_and_nobody_moves() -> None:
    table = make_table()
    load(table, 0, 1, 2)
    assert table.give_page(9.0) == Vacated(2, (), ())
    assert table.pages_away == 1 and table.free_slots == 1
    table.check_integrity()


def test_as_many_slots_are_counted_on_for_those_lent_one_by_one_as_are_left_when_most_pages_are_away() -> None:
    table = PagedLendingTable(EXPERTS, 3, 2, 2, Lru(len(EXPERTS)), 2)
    assert (table.slots_here, table.least_slots) == (6, 2)
    for _ in range(2):
        assert table.give_page(9.0) is not None
    assert table.slots_here == table.least_slots == 2


def test_the_least_valuable_go_and_the_others_of_their_page_move() -> None:
    table = make_table()
    load(table, *range(6))  # slots 0 to 5
    for number in (0, 3):  # used again: 1 and 2 are the oldest, in two pages
        table.touch(EXPERTS[number], 7.0)
    vacated = table.give_page(9.0)
    assert vacated == Vacated(1, (EXPERTS[1], EXPERTS[2]), ((3, 1),))
    assert table.slot(EXPERTS[3]) == 1 and table.state(EXPERTS[1]) is Residency.ABSENT
    table.check_integrity()


def test_what_is_protected_goes_only_in_need() -> None:
    table = make_table(2)
    load(table, 0, 1, 2, 3)
    table.protect([EXPERTS[0], EXPERTS[1]])
    vacated = table.give_page(9.0)
    assert vacated is not None and set(vacated.evicted) == {EXPERTS[2], EXPERTS[3]}
    table = make_table(2)
    load(table, 0, 1, 2, 3)
    table.protect(EXPERTS)
    assert table.give_page(9.0) is not None


def test_a_page_with_an_expert_that_is_held_or_on_its_way_stays() -> None:
    table = make_table(2)
    load(table, 0, 1, 2)
    table.begin(EXPERTS[5], transient=False, now=4.0)  # LOADING in the second page
    table.touch(EXPERTS[0], 5.0)
    table.touch(EXPERTS[1], 6.0)
    assert table.give_page(9.0) == Vacated(0, (EXPERTS[2], EXPERTS[0]), ((1, 2),))
    table = make_table(2)
    load(table, 0, 1, 2, 3)
    table.pin(EXPERTS[0])
    table.pin(EXPERTS[2])
    assert table.give_page(9.0) is None
    table.check_integrity()
    table.unpin(EXPERTS[2])
    vacated = table.give_page(9.0)
    assert vacated is not None and vacated.page == 1 and table.state(EXPERTS[0]) is Residency.READY


def test_nobody_gets_a_slot_of_a_page_that_is_away_until_it_is_back() -> None:
    table = make_table(2)
    vacated = table.give_page(0.0)
    assert vacated is not None
    load(table, 0, 1)
    placement = table.begin(EXPERTS[2], transient=False, now=3.0)
    assert placement is not None and placement.evicted == EXPERTS[0]
    table.restore(vacated.page)
    assert table.free_slots == 2
    table.check_integrity()


class Pages(RuleBasedStateMachine):
    """Experts come, are held and go while pages are given away and come back."""

    @initialize(pages=st.integers(2, 4), page_slots=st.integers(1, 3))
    def begin(self, pages: int, page_slots: int) -> None:
        self.table = make_table(pages + (page_slots == 1), page_slots)
        self.contents: dict[int, ExpertId] = {}  # by slot, as the memory would hold them
        self.away: set[int] = set()
        self.now = 0.0

    @rule(number=st.integers(0, len(EXPERTS) - 1), transient=st.booleans(), lands=st.booleans())
    def bring(self, number: int, transient: bool, lands: bool) -> None:
        expert = EXPERTS[number]
        self.now += 1
        if self.table.state(expert) is Residency.ABSENT and self.table.begin(expert, transient=transient, now=self.now):
            self.contents[self.table.slot(expert)] = expert
            if lands:
                self.table.finish(expert)

    @rule(number=st.integers(0, len(EXPERTS) - 1))
    def land_or_pin(self, number: int) -> None:
        expert = EXPERTS[number]
        if self.table.state(expert) is Residency.LOADING:
            self.table.finish(expert)
        elif self.table.state(expert) is Residency.READY:
            self.table.unpin(expert) if self.table.pins(expert) else self.table.pin(expert)

    @precondition(lambda self: self.table.pages - len(self.away) > 1)
    @rule()
    def give_away(self) -> None:
        held = {e for e in EXPERTS if self.table.pins(e) or self.table.state(e) is Residency.LOADING}
        lay = {expert: self.table.slot(expert) for expert in held}
        vacated = self.table.give_page(self.now)
        assert lay == {expert: self.table.slot(expert) for expert in held}
        if vacated is None:
            assert held, "only what is held or on its way can stand in the way"
            return
        assert vacated.page not in self.away and not held & set(vacated.evicted)
        for before, after in vacated.moves:
            self.contents[after] = self.contents[before]
        self.away.add(vacated.page)

    @precondition(lambda self: self.away)
    @rule()
    def take_back(self) -> None:
        self.table.restore(self.away.pop())

    @invariant()
    def everybody_lies_where_the_table_says(self) -> None:
        self.table.check_integrity()
        for expert in EXPERTS:
            if self.table.state(expert) is not Residency.ABSENT:
                assert self.contents[self.table.slot(expert)] == expert


TestPages = Pages.TestCase
