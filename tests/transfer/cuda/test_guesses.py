"""Guesses on the copy stream: right, wrong or random, they change no byte that a kernel reads, and end when told to."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.copier import HostCopier, Mark
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from tests.transfer.cuda import test_landing as landing
from tests.transfer.cuda import test_streams as streams
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, PAGE, backing, contents, made_up

COUNT = 3 * EXPERTS
WINDOW = 2  # of the source `slow`
numbers = st.lists(st.integers(0, COUNT - 1), max_size=8)
reasons = st.sampled_from([Reason.PREFETCH, Reason.DRAFT])
guesses = st.one_of(
    st.tuples(st.just("prefetch"), numbers, reasons, st.sampled_from([math.inf, math.inf, math.inf, 0.0])),
    st.tuples(st.just("cancel"), numbers, reasons),
    st.tuples(st.just("protect"), numbers),
    st.tuples(st.just("expect"), numbers),
    st.tuples(st.just("last"), numbers),
)


def tell(source: CudaSource, kind: str, what: Sequence[Any]) -> None:
    experts = [source.experts[number] for number in what[0]]
    if kind == "prefetch":
        source.prefetch(experts, *what[1:])
    elif kind == "cancel":
        source.cancel_prefetches(experts, what[1])
    elif kind == "expect":
        source.expect(experts)
        source.pump()
    elif kind == "last":
        source.expect(experts)
        source.send_last()
    else:
        source.protect(experts)


SENT_AHEAD = [("expect", [2, 11]), ("pass", [0, 1, 5], set()), ("lease", 1, [0, 1, 2], None), ("expect", [])]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, COUNT - 1),
    limit=st.none() | st.integers(1, 6),
    in_ring=st.just(()) | st.sets(st.integers(0, COUNT - 1)),
    steps=st.lists(st.one_of(guesses, guesses, streams.leases, streams.passes, streams.serves, streams.serves)),
)
@example(seed=0, slots=6, limit=None, in_ring={0, 1, 11}, steps=SENT_AHEAD)  # a guess once, now sent ahead of a lease
def test_served_and_leased_kernels_find_what_was_packed(
    seed: int, slots: int, limit: int | None, in_ring: set[int], steps: list[Any]
) -> None:
    machine = streams.Machine(seed, slots, in_ring, limit)
    source = machine.source
    source._shelf.spare_slots = min(3, slots // 4)
    with source:
        for kind, *what in steps:
            if kind == "lease":
                assert sorted(machine.lease(*what)) == sorted(what[1])
            elif kind == "pass":
                for layer in NAMES:
                    assert sorted(machine.lease(layer, *what)) == sorted(what[0])
            elif kind != "serve":
                tell(source, kind, what)
                machine.streams.some()
            elif source.serves(4):
                machine.serve(*what)
        source.check_integrity()
        assert source._shelf.table.transients <= source._shelf.transient_limit


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, COUNT - 1),
    policy=st.sampled_from(["lru", "lfru"]),
    events=st.lists(st.one_of(guesses, landing.events, landing.events)),
)
def test_kernels_that_read_by_themselves_find_what_was_packed(
    seed: int, slots: int, policy: str, events: list[Any]
) -> None:
    machine = landing.Machine(seed, slots, policy, chunk_bytes=PAGE // 4)
    with machine.source as source:
        for kind, *what in events:
            if kind == "step":
                machine.step(what[0])
            elif kind == "lease":
                machine.lease(*what)
            elif kind == "warm":
                source.warm(source.experts[number] for number in what[0])
            elif kind != "serve":
                tell(source, kind, what)
                machine.streams.some()
            elif source.serves(4):
                machine.serve(what[0])
        machine.check()


class Slow(HostCopier):
    """Copies at once, but no mark passes before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0
        self.moved: list[tuple[int, int, int]] = []
        self.moved_before: dict[int, int] = {}  # how many copies, by the ordinal of a mark

    def copied(self) -> Mark:
        mark = super().copied()
        self.moved_before[mark.ordinal] = len(self.moved)
        return mark

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        super().copy(source, into, size_bytes)
        self.moved.append((source, into, size_bytes))

    def passed(self, mark: Mark) -> bool:
        return mark.ordinal <= self.done

    def drain(self) -> None:
        self.done = self._marks


@pytest.fixture
def slow() -> tuple[CudaSource, Slow]:
    layers, copier = made_up(), Slow()
    behind = backing(contents(layers), copier)
    return CudaSource(
        layers, behind, slots=9, device=CPU, copier=copier, policy="lru", chunk_bytes=PAGE // 4, window=WINDOW,
        transient_limit=3,
    ), copier  # fmt: skip


def serve(source: CudaSource, *routed: Sequence[int]) -> None:
    source.begin()
    for layer, chosen in zip(NAMES, routed, strict=True):
        source.serve(layer, chosen)


def state(source: CudaSource, layer: int, expert: int) -> Residency:
    return source._shelf.table.state(ExpertId(layer, expert))


def test_few_chunks_are_on_the_stream_at_once(slow: tuple[CudaSource, Slow]) -> None:
    source, copier = slow
    with source:
        assert source.prefetch([ExpertId(2, 3), ExpertId(2, 3), ExpertId(4, 0)], Reason.PREFETCH, math.inf) == 3
        assert [size for _, _, size in copier.moved] == [PAGE // 4] * WINDOW
        assert state(source, 2, 3) is Residency.LOADING and state(source, 4, 0) is Residency.ABSENT
        for _ in range(3):
            copier.drain()
            source.prefetch([], Reason.PREFETCH, math.inf)
        assert len(copier.moved) == 4 * WINDOW
        assert source.residents == [ExpertId(2, 3), ExpertId(4, 0)]
        serve(source, [0], [3], [0])
        counts = source.counters()
        assert (counts.prefetch.hits, counts.prefetch.transfers, counts.misses) == (2, 2, 1)
        assert counts.prefetch.read_bytes == 2 * PAGE


@pytest.mark.parametrize("leased", [False, True])
def test_demand_goes_on_where_a_guess_stands(slow: tuple[CudaSource, Slow], leased: bool) -> None:
    source, copier = slow
    with source:
        source.prefetch([ExpertId(2, 3)], Reason.PREFETCH, math.inf)
        if leased:
            with source.lease(2, [3]) as lease:
                assert list(lease.waves()) == [(3,)]
        else:
            serve(source, [0], [3], [0])
        first, second, rest = (
            move for move in copier.moved if move[0] in range(copier.moved[0][0], copier.moved[0][0] + PAGE)
        )
        assert (first[2], second[2], rest[2]) == (PAGE // 4, PAGE // 4, PAGE // 2)
        assert rest[0] - first[0] == rest[1] - first[1] == PAGE // 2
        assert source.counters().prefetch.late == 1
        source.check_integrity()


def test_what_is_cancelled_is_cut_at_the_next_chunk(slow: tuple[CudaSource, Slow]) -> None:
    source, copier = slow
    with source:
        source.prefetch([ExpertId(2, 3), ExpertId(2, 4)], Reason.PREFETCH, math.inf)
        source.cancel_prefetches([ExpertId(2, 3), ExpertId(2, 4)], Reason.DRAFT)  # a lesser reason: it goes on
        assert state(source, 2, 3) is Residency.LOADING
        source.cancel_prefetches([ExpertId(2, 3), ExpertId(2, 4)])
        assert state(source, 2, 3) is Residency.ABSENT
        copier.drain()
        source.prefetch([], Reason.PREFETCH, math.inf)
        assert len(copier.moved) == WINDOW
        counts = source.counters().prefetch
        assert (counts.cancelled, counts.cancelled_bytes, counts.read_bytes) == (1, PAGE // 2, PAGE // 2)
        source.check_integrity()


def test_what_comes_too_late_is_cut(slow: tuple[CudaSource, Slow]) -> None:
    source, _ = slow
    with source:
        source.prefetch([ExpertId(2, 3)], Reason.DRAFT, 0.0)
        source.prefetch([], Reason.DRAFT, 0.0)
        assert state(source, 2, 3) is Residency.ABSENT
        source.check_integrity()


def test_a_guess_takes_no_slot_of_a_layer_that_may_still_run_nor_of_what_is_protected(
    slow: tuple[CudaSource, Slow],
) -> None:
    source, copier = slow
    with source:
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])  # the kernels of the last layer may not have begun
        source.protect([ExpertId(1, 0), ExpertId(1, 1), ExpertId(2, 0), ExpertId(2, 1)])
        wanted = [ExpertId(4, 3), ExpertId(4, 4), ExpertId(4, 5)]
        source.prefetch(wanted, Reason.PREFETCH, math.inf)
        for _ in range(12):
            copier.drain()
            source.prefetch([], Reason.PREFETCH, math.inf)
        left = {(each.layer, each.expert) for each in source.residents}
        assert {(4, 0), (4, 1), (4, 2), (1, 0), (1, 1), (2, 0), (2, 1)} <= left
        assert {(1, 2), (2, 2)}.isdisjoint(left), "what is left may go"
        assert len(left & {(4, 3), (4, 4), (4, 5)}) == 2
        source.check_integrity()


def test_a_step_that_begins_waits_until_no_victim_is_in_the_table() -> None:
    """The kernel of layer 1 would find expert 0 there, and the guess would be written over it."""
    for seed in range(40):
        machine = landing.Machine(seed, 8, "lru", chunk_bytes=PAGE // 4)
        with machine.source as source:
            for _ in range(3):
                machine.step([[0, 1], [2, 3], [4, 5]])
                source.prefetch([ExpertId(4, 0), ExpertId(4, 1)], Reason.PREFETCH, math.inf)
                machine.step([[0, 1], [2, 3], [0, 1]])
            machine.check()


def test_a_slot_whose_block_came_twice_is_not_given_to_a_guess_while_a_kernel_is_about_to_store_there() -> None:
    machine = landing.Machine(0, 14, "lru", chunk_bytes=PAGE, window=2)
    with machine.source as source:
        machine.serve([[0, 1, 2], [0, 1, 2], [0, 1]])
        machine.step([[3], [3], [0]])  # one slot is left
        machine.streams.drain()
        machine.streams._copying = 0.0  # the copy stream stands still
        source.prefetch([ExpertId(1, 5)], Reason.PREFETCH, math.inf)  # takes it
        ticket = source.landing.begin()  # type: ignore[union-attr]
        source.prefetch([ExpertId(4, 5)], Reason.PREFETCH, math.inf)  # waits for another
        routers = [landing.Router(machine, layer, chosen) for layer, chosen in zip(NAMES, ([5], [0], [0]), strict=True)]
        for layer, router in zip(NAMES, routers, strict=True):
            machine.streams.launch(router)
            machine.streams.launch(landing.Reader(machine, layer, router))
        for layer, router in zip(NAMES, routers, strict=True):
            machine.streams.until(lambda router=router: router.posted is not None)  # type: ignore[misc]
            ticket = source.landing.follow(layer, router.posted, ticket)  # type: ignore[union-attr,arg-type]
            machine.streams._copying = 1.0
            machine.streams.some(1000)  # everything is copied before the kernel stores what it has read
            machine.streams._copying = 0.5
        source.landing.end()  # type: ignore[union-attr]
        assert routers[0].target != [0], "the first guess was not there for the router"
        machine.check()
