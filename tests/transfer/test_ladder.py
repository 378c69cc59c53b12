"""The ladder's state, driven by hand: any order of asking, guessing, arriving and failing keeps it sound."""

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import make_policy
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.link import BlockAddress, Piece
from steerpipe.transfer.queue import Reason

PAGE = 4096
BLOCK = 3 * PAGE
EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(5)]
ADDRESSES = {expert: BlockAddress(expert, index * BLOCK, BLOCK) for index, expert in enumerate(EXPERTS)}
GUESSES = [Reason.PREFETCH, Reason.DRAFT]


def make_ladder(slots: int = 3, limit: int = 2, chunk_bytes: int = PAGE) -> Ladder:
    table = SlotTable(EXPERTS, slots, make_policy("lfru", len(EXPERTS)), limit)
    ladder = Ladder(ADDRESSES, table, limit, chunk_bytes)
    ladder.lock.acquire()  # for good: nobody else is there
    return ladder


def problem() -> TransferError:
    return TransferError("the block is gone", fix="fetch it")


class LadderMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(2, 6), limit=st.integers(1, 3), pages=st.integers(1, 8))
    def begin(self, slots: int, limit: int, pages: int) -> None:
        self.slots = slots
        self.ladder = make_ladder(slots, limit, pages * PAGE)
        self.pinned: Counter[ExpertId] = Counter()
        self.lies: dict[ExpertId, int] = {}  # slot of what is pinned
        self.reading: list[Piece] = []
        self.decoding: list[ExpertId] = []
        self.visits = 0

    @rule(expert=st.sampled_from(EXPERTS), transient=st.booleans())
    def demand(self, expert: ExpertId, transient: bool) -> None:
        if self.ladder.demand(expert, transient=transient):
            self.pinned[expert] += 1
            self.lies[expert] = self.ladder.table.slot(expert)
        else:
            assert self.ladder.table.state(expert) is Residency.ABSENT

    @precondition(lambda self: self.pinned)
    @rule(pick=st.randoms(use_true_random=False))
    def let_go(self, pick) -> None:  # type: ignore[no-untyped-def]
        expert = pick.choice(sorted(self.pinned))
        self.ladder.let_go(expert)
        self.pinned[expert] -= 1
        if not self.pinned[expert]:
            del self.pinned[expert], self.lies[expert]

    @rule(
        expert=st.sampled_from(EXPERTS),
        reason=st.sampled_from(GUESSES),
        deadline=st.sampled_from([1.0, 2.0, math.inf]),
        transient=st.booleans(),
        ahead=st.booleans(),
    )
    def guess(self, expert: ExpertId, reason: Reason, deadline: float, transient: bool, ahead: bool) -> None:
        absent = self.ladder.table.state(expert) is Residency.ABSENT
        if self.ladder.guess(expert, reason, deadline, transient=transient) and absent and transient and ahead:
            self.ladder.ahead.add(expert)

    @rule(experts=st.sets(st.sampled_from(EXPERTS)), reason=st.sampled_from(GUESSES))
    def withdraw(self, experts: set[ExpertId], reason: Reason) -> None:
        self.ladder.withdraw(experts, reason)

    @rule(now=st.sampled_from([0.5, 1.5, 3.0]))
    def expire(self, now: float) -> None:
        self.ladder.expire(now)

    @precondition(lambda self: len(self.reading) < 6)
    @rule()
    def take(self) -> None:
        self.reading += self.ladder.next_visit()

    @precondition(lambda self: self.reading)
    @rule(pick=st.randoms(use_true_random=False), fails=st.sampled_from([False, False, False, True]))
    def arrive(self, pick, fails: bool) -> None:  # type: ignore[no-untyped-def]
        piece = self.reading.pop(pick.randrange(len(self.reading)))
        if fails:
            self.ladder.failed(piece, problem())
        elif self.ladder.arrived(piece) is not None:
            self.decoding.append(piece.address.expert)

    @precondition(lambda self: self.decoding)
    @rule(spoiled=st.sampled_from([False, False, True]))
    def decode(self, spoiled: bool) -> None:
        expert = self.decoding.pop(0)
        if spoiled:
            self.ladder.spoiled(expert, problem())
        else:
            self.ladder.ready(expert)

    @invariant()
    def sound(self) -> None:
        table = self.ladder.table
        table.check_integrity()
        self.ladder.queue.check_integrity()
        for expert in EXPERTS:
            assert table.pins(expert) == self.pinned[expert]
            if self.pinned[expert]:
                assert table.slot(expert) == self.lies[expert], "what is leased was moved"
            state = table.state(expert)
            if state is not Residency.LOADING:
                assert expert not in self.ladder.broken
            on_its_way = expert in self.ladder.queue or expert in self.decoding or expert in self.ladder.broken
            assert (state is Residency.LOADING) == on_its_way, f"{expert} is {state} and nobody brings it"
        for piece in self.reading:
            assert table.state(piece.address.expert) is Residency.LOADING, "bytes arrive for a slot that is not theirs"

    def teardown(self) -> None:
        if not hasattr(self, "ladder"):
            return
        for expert in list(self.pinned.elements()):
            self.ladder.let_go(expert)
        while self.reading or self.decoding or len(self.ladder.queue):
            self.reading += self.ladder.next_visit()
            for piece in self.reading:
                if self.ladder.arrived(piece) is not None:
                    self.decoding.append(piece.address.expert)
            self.reading = []
            for expert in self.decoding:
                self.ladder.ready(expert)
            self.decoding = []
        assert self.ladder.idle
        assert not self.ladder.broken
        assert self.ladder.slabs.idle
        assert len(self.ladder.table.resident()) <= self.slots


LadderMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestLadder = LadderMachine.TestCase


def read(ladder: Ladder) -> list[ExpertId]:
    """One visit of a reader, to its end; the experts that became ready."""
    done = []
    for piece in ladder.next_visit():
        if ladder.arrived(piece) is not None:
            ladder.ready(piece.address.expert)
            done.append(piece.address.expert)
    return done


def test_a_wrong_guess_is_cut_at_the_next_chunk_and_its_bytes_are_counted() -> None:
    ladder = make_ladder()
    assert ladder.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)
    (piece,) = ladder.next_visit()
    ladder.withdraw([EXPERTS[0]], Reason.PREFETCH)
    assert ladder.table.state(EXPERTS[0]) is Residency.LOADING  # a chunk is in flight
    ladder.arrived(piece)
    assert ladder.table.state(EXPERTS[0]) is Residency.ABSENT
    assert (ladder.tally.of[Reason.PREFETCH].cancelled, ladder.tally.of[Reason.PREFETCH].cancelled_bytes) == (1, PAGE)


def test_a_guess_that_is_demanded_moves_no_byte_twice() -> None:
    ladder = make_ladder()
    ladder.guess(EXPERTS[0], Reason.DRAFT, math.inf, transient=True)
    read(ladder)
    assert ladder.demand(EXPERTS[0], transient=False)
    while not read(ladder):
        pass
    counts = ladder.tally.of
    assert (counts[Reason.DRAFT].read_bytes, counts[Reason.DEMAND].read_bytes) == (PAGE, BLOCK - PAGE)
    assert counts[Reason.DRAFT].transfers == 1
    ladder.let_go(EXPERTS[0])
    assert ladder.table.resident() == [EXPERTS[0]]  # worth keeping now


def test_demand_is_read_before_guesses_that_came_first() -> None:
    ladder = make_ladder()
    ladder.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)
    ladder.demand(EXPERTS[5], transient=False)
    assert {piece.address.expert for piece in ladder.next_visit()} == {EXPERTS[5]}


def test_demand_cuts_a_guess_when_there_is_no_slot_and_the_least_urgent_first() -> None:
    ladder = make_ladder(slots=2, limit=2)
    ladder.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)
    ladder.guess(EXPERTS[1], Reason.DRAFT, math.inf, transient=True)
    assert ladder.demand(EXPERTS[5], transient=False)
    assert ladder.table.state(EXPERTS[1]) is Residency.ABSENT
    assert ladder.table.state(EXPERTS[0]) is Residency.LOADING


def test_nobody_guesses_while_a_lease_waits_for_slots() -> None:
    ladder = make_ladder()
    ladder.hungry = 1
    assert not ladder.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)
    ladder.hungry = 0
    assert ladder.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)


def test_what_failed_stays_until_the_last_who_waits_has_seen_it() -> None:
    ladder = make_ladder()
    for _ in range(2):
        assert ladder.demand(EXPERTS[0], transient=False)
    for piece in ladder.next_visit():
        ladder.failed(piece, problem())
    assert EXPERTS[0] in ladder.broken
    ladder.let_go(EXPERTS[0])
    assert EXPERTS[0] in ladder.broken
    ladder.let_go(EXPERTS[0])
    assert ladder.idle
    assert ladder.table.state(EXPERTS[0]) is Residency.ABSENT
    assert ladder.tally.failures == 1


def test_a_demanded_block_is_one_visit_and_a_guess_is_one_chunk_at_a_time() -> None:
    ladder = make_ladder()
    ladder.demand(EXPERTS[0], transient=False)
    assert sum(len(piece.into) for piece in ladder.next_visit()) == BLOCK
    other = make_ladder()
    other.guess(EXPERTS[0], Reason.PREFETCH, math.inf, transient=True)
    assert sum(len(piece.into) for piece in other.next_visit()) == PAGE


@pytest.mark.parametrize("asked", [(0, 1, 2), (2, 4), (3,)])
def test_blocks_that_are_neighbours_are_one_visit_and_a_stranger_ends_it(asked: tuple[int, ...]) -> None:
    ladder = make_ladder(slots=6, chunk_bytes=8 * BLOCK)
    for index in (*asked, 7, 9):
        ladder.demand(EXPERTS[index], transient=False)
    visited = [EXPERTS.index(piece.address.expert) for piece in ladder.next_visit()]
    assert visited == {(0, 1, 2): [0, 1, 2, 7], (2, 4): [2, 4], (3,): [3, 7]}[asked]


def test_memory_for_reads_is_used_again() -> None:
    ladder = make_ladder(slots=6)
    for expert in EXPERTS[:6]:
        ladder.demand(expert, transient=False)
        assert read(ladder) == [expert]
    assert ladder.slabs.allocated == 1
