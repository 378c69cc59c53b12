"""The queue of transfers: priority at every chunk, continuation, cancellation, failure."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.ids import ExpertId
from steerpipe.transfer.queue import Chunk, Outcome, Reason, Transfer, TransferQueue

A, B, C, D, E = EXPERTS = [ExpertId(0, expert) for expert in range(5)]
SIZE = 10


def transfer(expert: ExpertId, reason: Reason = Reason.DEMAND, deadline: float = 0.0, done_bytes: int = 0) -> Transfer:
    return Transfer(expert, reason, deadline, SIZE, done_bytes)


def queue_of(*transfers: Transfer) -> TransferQueue:
    queue = TransferQueue()
    for each in transfers:
        queue.add(each)
    return queue


def drain(queue: TransferQueue, chunk_bytes: int = SIZE) -> list[ExpertId]:
    """Moves everything, one chunk after the other; the experts in the order of their chunks."""
    order = []
    while (chunk := queue.take(chunk_bytes)) is not None:
        order.append(chunk.expert)
        queue.advance(chunk.expert, chunk.length)
        queue.check_integrity()
    assert not len(queue)
    return order


def test_a_transfer_is_moved_in_chunks_that_cover_it_once() -> None:
    queue = queue_of(transfer(A))
    assert [queue.take(4) for _ in range(4)] == [Chunk(A, 0, 4), Chunk(A, 4, 4), Chunk(A, 8, 2), None]
    assert [queue.advance(A, length) for length in (4, 4, 2)] == [Outcome.MOVING, Outcome.MOVING, Outcome.DONE]
    assert A not in queue


def test_demand_goes_before_prefetch_before_draft() -> None:
    queue = queue_of(transfer(A, Reason.DRAFT, 1.0), transfer(B, Reason.PREFETCH, 2.0), transfer(C, deadline=3.0))
    assert drain(queue) == [C, B, A]


def test_then_the_earlier_deadline_then_the_order_of_arrival() -> None:
    waiting = [transfer(expert, Reason.PREFETCH, deadline) for expert, deadline in ((C, 2.0), (A, 2.0), (B, 1.0))]
    assert drain(queue_of(*waiting)) == [B, C, A]


def test_a_demand_overtakes_a_prefetch_at_the_next_chunk() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH))
    assert queue.take(4) == Chunk(A, 0, 4)
    queue.add(transfer(B))
    assert queue.take(4) == Chunk(B, 0, 4)


def test_what_has_begun_goes_on_before_its_equals() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH, 5.0))
    queue.take(4)
    queue.add(transfer(B, Reason.PREFETCH, 1.0))
    assert queue.take(4) == Chunk(A, 4, 4)


def test_an_interrupted_prefetch_is_resumed_where_it_stands() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH))
    queue.take(4)
    queue.advance(A, 4)
    queue.add(transfer(B))
    assert drain(queue, chunk_bytes=5) == [B, B, A, A]


def test_a_prefetch_that_is_demanded_is_continued_with_the_demands_rank() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH, 9.0), transfer(B, Reason.PREFETCH, 1.0), transfer(C, Reason.PREFETCH))
    queue.take(4)  # of C, which has the earliest deadline
    queue.add(transfer(A, Reason.DEMAND, 2.0))
    assert queue.reason(A) is Reason.DEMAND
    assert queue.take(SIZE) == Chunk(A, 0, SIZE)
    assert queue.take(SIZE) == Chunk(C, 4, SIZE - 4)


def test_a_weaker_reason_or_a_later_deadline_changes_nothing() -> None:
    queue = queue_of(transfer(A, Reason.DEMAND, 1.0), transfer(B, Reason.DEMAND, 2.0))
    queue.add(transfer(A, Reason.DRAFT, 9.0))
    assert queue.reason(A) is Reason.DEMAND
    assert drain(queue) == [A, B]


def test_a_block_of_which_a_part_is_there_is_moved_from_there() -> None:
    assert queue_of(transfer(A, done_bytes=7)).take(SIZE) == Chunk(A, 7, 3)


def test_a_withdrawn_guess_does_not_stop_a_demand() -> None:
    queue = queue_of(transfer(A), transfer(B, Reason.PREFETCH), transfer(C, Reason.DRAFT))
    assert queue.cancel(A, Reason.PREFETCH) is None
    assert queue.cancel(B, Reason.DRAFT) is None
    assert queue.cancel(C, Reason.PREFETCH) is Outcome.CUT
    assert queue.cancel(D, Reason.DEMAND) is None
    assert drain(queue) == [A, B]


def test_a_cancelled_transfer_is_cut_at_the_next_chunk() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH), transfer(B, Reason.DRAFT))
    queue.take(4)
    assert queue.cancel(A, Reason.PREFETCH) is Outcome.MOVING  # its slot is still written to
    assert queue.take(4) == Chunk(B, 0, 4)
    assert queue.advance(A, 4) is Outcome.CUT
    assert A not in queue


def test_a_cancelled_transfer_whose_last_chunk_lands_is_done() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH))
    queue.take(SIZE)
    queue.cancel(A, Reason.PREFETCH)
    assert queue.advance(A, SIZE) is Outcome.DONE


def test_a_cancelled_transfer_that_is_demanded_before_it_has_left_goes_on() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH), transfer(B))
    queue.take(SIZE)
    queue.take(4)
    queue.cancel(A, Reason.PREFETCH)
    queue.add(transfer(A))
    assert queue.take(SIZE) == Chunk(A, 4, 6)


def test_only_guesses_expire() -> None:
    queue = queue_of(
        transfer(A, Reason.DEMAND, 1.0),
        transfer(B, Reason.PREFETCH, 1.0),
        transfer(C, Reason.DRAFT, 1.5),
        transfer(D, Reason.PREFETCH, 2.0),
    )
    assert queue.expire(2.0) == [B, C]
    assert drain(queue) == [A, D]


def test_an_expired_guess_with_a_chunk_in_flight_is_cut_when_it_lands() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH, 1.0))
    queue.take(4)
    assert queue.expire(2.0) == []
    assert queue.take(4) is None
    assert queue.advance(A, 4) is Outcome.CUT


def test_a_failed_chunk_ends_its_transfer_when_the_others_have_landed() -> None:
    queue = queue_of(transfer(A), transfer(B))
    queue.take(4)
    queue.take(4)
    assert queue.failed(A, 4) is Outcome.MOVING
    assert queue.take(4) == Chunk(B, 0, 4)
    assert queue.advance(A, 4) is Outcome.CUT
    assert queue.failed(B, 4) is Outcome.CUT
    assert not len(queue)


def test_a_failed_transfer_that_is_added_again_begins_anew() -> None:
    queue = queue_of(transfer(A))
    queue.take(4)
    queue.take(4)
    queue.failed(A, 4)
    queue.add(transfer(A))
    assert queue.take(4) is None
    assert queue.advance(A, 4) is Outcome.MOVING
    assert queue.take(SIZE) == Chunk(A, 0, SIZE)  # the hole is filled


def test_what_waits_is_listed_by_reason() -> None:
    queue = queue_of(transfer(A, Reason.PREFETCH, 2.0), transfer(B), transfer(C, Reason.PREFETCH, 1.0))
    queue.take(SIZE)
    assert queue.waiting(Reason.PREFETCH) == [A, C]
    assert queue.waiting(Reason.DEMAND) == []
    assert queue.done_bytes(A) == 0


@pytest.mark.parametrize("length", [0, 5])
def test_bytes_that_were_not_in_flight_cannot_land(length: int) -> None:
    queue = queue_of(transfer(A))
    queue.take(4)
    with pytest.raises(AssertionError, match="not in flight"):
        queue.advance(A, length)


def test_a_transfer_has_something_left_to_move() -> None:
    with pytest.raises(AssertionError, match="10 of 10"):
        transfer(A, done_bytes=SIZE)


class QueueMachine(RuleBasedStateMachine):
    """Any order of calls, against what a reader of the contract would write down on paper."""

    @initialize(chunk_bytes=st.integers(1, 12))
    def start(self, chunk_bytes: int) -> None:
        self.queue, self.chunk_bytes = TransferQueue(), chunk_bytes
        self.wanted: dict[ExpertId, tuple[Reason, float]] = {}
        self.moved: dict[ExpertId, list[int]] = {}  # the bytes of the block that were handed out
        self.flying: list[Chunk] = []
        self.cut: set[ExpertId] = set()

    def in_flight(self, expert: ExpertId) -> bool:
        return any(chunk.expert == expert for chunk in self.flying)

    def forget(self, expert: ExpertId) -> None:
        for record in (self.wanted, self.moved):
            record.pop(expert, None)
        self.cut.discard(expert)

    def waiting(self) -> set[ExpertId]:
        return {expert for expert in self.wanted if expert not in self.cut and len(self.moved[expert]) < SIZE}

    @rule(expert=st.sampled_from(EXPERTS), reason=st.sampled_from(list(Reason)), deadline=st.integers(0, 9))
    def add(self, expert: ExpertId, reason: Reason, deadline: int) -> None:
        self.queue.add(transfer(expert, reason, float(deadline)))
        if expert in self.wanted and expert not in self.cut:
            before = self.wanted[expert]
            self.wanted[expert] = (min(before[0], reason), min(before[1], float(deadline)))
        else:
            self.wanted[expert] = (reason, float(deadline))
        self.moved.setdefault(expert, [])
        self.cut.discard(expert)

    @rule()
    def take(self) -> None:
        chunk = self.queue.take(self.chunk_bytes)
        waiting = self.waiting()
        assert (chunk is None) == (not waiting)
        if chunk is None:
            return
        assert chunk.offset == len(self.moved[chunk.expert])  # continued, never read again
        assert 0 < chunk.length <= self.chunk_bytes
        assert chunk.expert in waiting
        mine = self.wanted[chunk.expert]
        assert mine[0] == min(self.wanted[expert][0] for expert in waiting)  # demand first at every boundary
        if not chunk.offset:  # it begins: nothing of its reason had begun, and nothing is more urgent
            equals = [expert for expert in waiting if self.wanted[expert][0] == mine[0]]
            assert not any(self.moved[expert] for expert in equals)
            assert mine[1] == min(self.wanted[expert][1] for expert in equals)
        self.moved[chunk.expert] += range(chunk.offset, chunk.offset + chunk.length)
        self.flying.append(chunk)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.flying)
    def land(self, index: int) -> None:
        chunk = self.flying.pop(index % len(self.flying))
        outcome = self.queue.advance(chunk.expert, chunk.length)
        if self.in_flight(chunk.expert):
            assert outcome is Outcome.MOVING
        elif len(self.moved[chunk.expert]) == SIZE:
            assert outcome is Outcome.DONE
            assert self.moved[chunk.expert] == list(range(SIZE))  # every byte once
            self.forget(chunk.expert)
        elif chunk.expert in self.cut:
            assert outcome is Outcome.CUT
            self.forget(chunk.expert)
        else:
            assert outcome is Outcome.MOVING

    @rule(expert=st.sampled_from(EXPERTS), reason=st.sampled_from(list(Reason)))
    def cancel(self, expert: ExpertId, reason: Reason) -> None:
        outcome = self.queue.cancel(expert, reason)
        if expert not in self.wanted or self.wanted[expert][0] < reason:
            assert outcome is None
        else:
            self.record_cut(expert, outcome is Outcome.CUT)

    @rule(now=st.integers(0, 10))
    def expire(self, now: int) -> None:
        late = {e for e in self.waiting() if self.wanted[e][0] is not Reason.DEMAND and self.wanted[e][1] < now}
        gone = set(self.queue.expire(float(now)))
        assert gone <= late
        for expert in late:
            self.record_cut(expert, expert in gone)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.flying)
    def fail_all_of_one(self, index: int) -> None:
        """Every chunk of a transfer fails: it leaves with the last of them."""
        expert = self.flying[index % len(self.flying)].expert
        outcomes = [self.queue.failed(expert, chunk.length) for chunk in self.flying if chunk.expert == expert]
        assert outcomes == [Outcome.MOVING] * (len(outcomes) - 1) + [Outcome.CUT]
        self.flying = [chunk for chunk in self.flying if chunk.expert != expert]
        self.forget(expert)

    def record_cut(self, expert: ExpertId, at_once: bool) -> None:
        assert at_once != self.in_flight(expert)
        if at_once:
            self.forget(expert)
        else:
            self.cut.add(expert)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert len(self.queue) == len(self.wanted)
            assert {expert for expert in EXPERTS if expert in self.queue} == self.wanted.keys()

    def teardown(self) -> None:
        """Whatever came before: what is wanted arrives in full, once."""
        if not hasattr(self, "queue"):
            return
        while self.flying:
            self.land(0)
        while self.wanted:
            self.take()
            self.land(0)
        assert self.queue.take(1) is None


TestQueue = QueueMachine.TestCase
