"""Many at a time is one after the other: NumberedTable against SlotTable."""

from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.ids import ExpertId
from steerpipe.store.numbered import NumberedTable
from steerpipe.store.policies import make_policy
from steerpipe.store.residency import Residency, SlotTable

COUNT = 14
EXPERTS = [ExpertId(0, number) for number in range(COUNT)]

numbers = st.lists(st.integers(0, COUNT - 1), unique=True, max_size=9)
steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "finish", "pin", "unpin", "promote", "touch", "nominate", "protect"]),
        numbers, st.booleans(), st.booleans(),
    ),
    max_size=40,
)  # fmt: skip


def able(table: SlotTable, what: str, number: int) -> bool:
    state, pins = table.state(EXPERTS[number]), table.pins(EXPERTS[number])
    match what:
        case "begin":
            return state is Residency.ABSENT
        case "finish":
            return state is Residency.LOADING
        case "unpin":
            return pins > 0
        case "pin" | "promote":
            return state is not Residency.ABSENT
    return True


def one_by_one(
    table: SlotTable, what: str, those: list[int], *, transient: bool, speculative: bool, now: int
) -> tuple[list[int], list[int]]:  # fmt: skip
    slots: list[int] = []
    evicted: list[int] = []
    for number in those:
        match what:
            case "begin":
                place = table.begin(EXPERTS[number], transient=transient, now=now, speculative=speculative)
                if place is None:
                    break
                slots.append(place.slot)
                evicted += [] if place.evicted is None else [place.evicted.expert]
            case "finish" | "pin" | "unpin" | "promote":
                getattr(table, what)(EXPERTS[number])
            case "touch":
                table.touch(EXPERTS[number], now)
    return slots, evicted


@given(steps, st.integers(2, 10), st.integers(1, 6), st.sampled_from(["lru", "lfru"]), st.booleans())
def test_many_at_a_time_is_one_after_the_other(
    steps: list[tuple[str, list[int], bool, bool]], slots: int, limit: int, policy: str, lingers: bool
) -> None:
    single = SlotTable(EXPERTS, slots, make_policy(policy, COUNT), limit, lingers=lingers)
    many = NumberedTable(EXPERTS, slots, make_policy(policy, COUNT), limit, lingers=lingers)
    for now, (what, those, transient, speculative) in enumerate(steps):
        able_ones = [number for number in those if able(single, what, number)]
        wanted = one_by_one(single, what, able_ones, transient=transient, speculative=speculative, now=now)
        match what:
            case "begin":
                found = many.begin_many(able_ones, transient=transient, now=now, speculative=speculative)
                assert found == wanted
                assert many.slots_of(able_ones[: len(found[0])]) == found[0]
            case "finish" | "pin" | "unpin" | "promote":
                getattr(many, f"{what}_many")(able_ones)
            case "touch":
                many.touch_many(able_ones, now)
            case "nominate":  # changes no decision
                many.nominate(1 + len(able_ones), now)
            case "protect":
                for table in (single, many):
                    table.protect(EXPERTS[number] for number in able_ones)
        assert list(many.lingering) == list(single.lingering)
        assert many.resident() == single.resident() and many.free_slots == single.free_slots
        many.check_integrity()


def test_what_lingered_and_is_kept_now_may_be_the_next_victim() -> None:
    table = NumberedTable(EXPERTS, 3, make_policy("lru", COUNT), 2, lingers=True)
    for number, transient in ((0, False), (1, False), (2, True)):
        table.begin_many([number], transient=transient, now=0)
    table.finish_many([0, 1, 2])
    table.touch_many([0, 1], 1)
    table.nominate(2, 1)
    table.promote_many([2])  # and was never used
    assert table.begin_many([5], transient=False, now=2)[1] == [2]


def test_where_nothing_lingers_transients_are_the_policys() -> None:
    table = NumberedTable(EXPERTS, 2, make_policy("lru", COUNT), 2, lingers=False)
    table.begin_many([0], transient=False, now=0)
    table.begin_many([1], transient=True, now=0)
    table.finish_many([0, 1])  # nobody pins it: it stays until its slot is wanted
    table.touch_many([0], 1)
    table.nominate(2, 1)
    assert table.begin_many([5], transient=False, now=2)[1] == [1]
