"""Pages of a GPU's slots, lent to keys and values on streams that lag: nobody writes where another reads."""

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.blocks import SentBlock
from steerpipe.core.errors import TransferError
from steerpipe.core.pages import PagePlan, PageShape
from steerpipe.transfer.cuda.copier import HostCopier
from steerpipe.transfer.cuda.paging import CudaPages
from steerpipe.transfer.cuda.sending import NOBODY
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from tests.transfer.cuda.blocks import CPU, PAGE, backing, contents, made_up
from tests.transfer.cuda.streams import COMPUTE, COPY
from tests.transfer.cuda.test_landing import COUNT, Machine, events

SLOTS = 3  # of a page


def plan_of(pages: int, kv_pages: int, slots: int = SLOTS) -> PagePlan:
    return PagePlan(PageShape(1, slots, slots * PAGE + 64, PAGE), pages, kv_pages)


def lender_of(source: CudaSource) -> CudaPages:
    assert source.lender is not None
    return source.lender


class Keys:
    """Kernels of the computing stream that fill a page, or read it for some time."""

    def __init__(self, machine: Machine, page: int, address: int) -> None:
        self._machine, self.page, self._address = machine, page, address
        self._size = lender_of(machine.source).shape.page_bytes

    def write(self) -> bool:
        held = [each for each in self._machine.source._memory.addresses if self._holds(each)]
        assert not any(self._machine.streams.reading.get(each) for each in held), "keys go where experts are read"
        ctypes.memset(self._address, 0xA5, self._size)
        return True

    def read(self, steps: list[int]) -> bool:
        assert ctypes.string_at(self._address, self._size) == b"\xa5" * self._size, "somebody wrote over keys"
        steps.append(1)
        return len(steps) == 4

    def _holds(self, address: int) -> bool:
        return self._address <= address < self._address + self._size


def take(machine: Machine) -> Keys:
    page, memory = lender_of(machine.source).take()
    keys = Keys(machine, page, memory.data_ptr())
    machine.streams.launch(keys.write)
    return keys


def give_back(machine: Machine, keys: Keys) -> None:
    steps: list[int] = []
    machine.streams.launch(lambda: keys.read(steps))
    lender_of(machine.source).give_back(keys.page)
    machine.streams.some()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    pages=st.integers(4, 7),
    policy=st.sampled_from(["lru", "lfru"]),
    events=st.lists(st.one_of(events, st.tuples(st.sampled_from(["take", "take", "back"]))), max_size=14),
)
def test_kernels_find_their_blocks_and_their_keys_whoever_holds_the_pages(
    seed: int, pages: int, policy: str, events: list[tuple]  # type: ignore[type-arg]
) -> None:  # fmt: skip
    plan = plan_of(pages, pages - 3)
    machine = Machine(seed, 0, policy, plan=plan)
    held: list[Keys] = []
    with machine.source as source:
        for kind, *what in events:
            if kind == "step":
                machine.step(what[0])
            elif kind == "lease":
                machine.lease(*what)
            elif kind == "warm":
                source.warm(source.experts[number] for number in what[0])
            elif kind == "take" and len(held) < plan.kv_pages:
                held.append(take(machine))
            elif kind == "back" and held:
                give_back(machine, held.pop(0))
            elif kind == "serve" and source.serves(4):
                machine.serve(what[0])
        machine.check()
        assert lender_of(source).counts().kv == len(held)
        machine.streams.drain()
        for keys in held:
            keys.read([])


def guard_moves(machine: Machine) -> None:
    """Bytes are moved while nobody computes or copies."""
    move, memory = machine.source._memory.move, machine.source._memory

    def guarded(before: int, after: int) -> None:
        queues = machine.streams._queues
        assert not queues[COMPUTE], "somebody computes"
        assert all("write" in each.__qualname__ for each in queues[COPY]), "blocks are on their way"
        move(before, after)

    memory.move = guarded  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(8))
def test_experts_come_when_the_keys_have_been_read(seed: int) -> None:
    machine = Machine(seed, 0, "lru", plan=plan_of(4, 2))
    with machine.source as source:
        machine.lease(1, range(6))
        page, memory = lender_of(source).take()
        keys, steps = Keys(machine, page, memory.data_ptr()), list[int]()
        machine.streams.launch(keys.write)
        machine.streams.launch(lambda: keys.read(steps))
        lender_of(source).give_back(page)
        for layer in (2, 4):  # their copies wait for nothing else
            machine.lease(layer, range(6))
        machine.check()
        assert len(steps) == 4


@pytest.mark.parametrize("seed", range(8))
def test_pages_change_hands_between_steps_of_every_kind(seed: int) -> None:
    machine = Machine(seed, 0, "lru", plan=plan_of(5, 2))
    guard_moves(machine)
    some, others = [[0, 1, 2], [3, 4, 5], [0, 2, 4]], [[5, 4], [1, 2], [1, 3, 5]]
    with machine.source as source:
        source.warm(source.experts)
        machine.step(some)
        first = take(machine)
        machine.step(others)
        second = take(machine)
        machine.lease(1, range(6))
        machine.step(some)
        give_back(machine, first)
        machine.serve(others)
        third = take(machine)
        machine.serve(some)
        give_back(machine, second)
        machine.step(others)
        machine.lease(4, range(6))
        give_back(machine, third)
        machine.check()
        counts = lender_of(source).counts()
        assert (counts.taken, counts.returned, counts.kv) == (3, 3, 0) and counts.moved


def opened(pages: int, kv_pages: int) -> CudaSource:
    layers, copier = made_up(), HostCopier()
    return CudaSource(
        layers, backing(contents(layers), copier), slots=0, device=CPU, copier=copier, policy="lru",
        plan=plan_of(pages, kv_pages),
    )  # fmt: skip


def all_here(source: CudaSource, numbers: Sequence[int]) -> bool:
    """With the bytes that were packed."""
    blocks, memory, table = contents(source.layers), source._memory, source._shelf.table
    here = all(source._shelf.here[number] for number in numbers)
    return here and all(
        ctypes.string_at(memory.addresses[slot], PAGE) == blocks[number]
        for number, slot in zip(numbers, table.slots_of(numbers), strict=True)
    )


def test_the_least_valuable_go_and_the_others_of_their_page_move() -> None:
    with opened(4, 2) as source:
        source.warm(source.experts[:12])
        for number in range(12):
            source.policy.touch(number, number)
        for number in (0, 1, 3, 4, 6, 7, 9, 10):  # used again: the oldest lie in all pages
            source.policy.touch(number, 20 + number)
        page, memory = lender_of(source).take()
        memory.fill_(0xFF)
        assert page == 2 and lender_of(source).counts().moved == 2
        assert all_here(source, (0, 1, 3, 4, 6, 7, 9, 10, 11)) and not any(source._shelf.here[at] for at in (2, 5, 8))
        source.check_integrity()
        lender_of(source).give_back(page)
        assert source._shelf.table.free_slots == SLOTS
        source.check_integrity()


def test_a_page_is_had_although_guesses_are_on_their_way_to_every_page() -> None:
    with opened(3, 1) as source:
        source._shelf.chunk_bytes = 512  # a block is never there at once
        source._shelf.transient_limit = 9
        source._shelf.table._transient_limit = 9
        assert source.prefetch(source.experts[:9], Reason.PREFETCH, math.inf) == 9
        page, _ = lender_of(source).take()
        source.check_integrity()
        lender_of(source).give_back(page)


def test_what_was_sent_for_the_next_step_is_given_up_when_a_page_is_taken() -> None:
    """Its slot may lie in the page, and half of its block with it."""
    machine = Machine(0, 0, "lru", plan=plan_of(7, 2))
    with machine.source as source:
        assert source.landing is not None and source.landing.guesses is not None
        guesses = source.landing.guesses
        guesses.begin()
        machine.streams.drain()
        guesses.head[0] += 1  # a ticket that the device takes, and its tag
        guesses.tags[0, 0] = 1
        guesses.owe(1, lambda: [SentBlock(0, 1.0)])
        lender_of(source).take()
        assert (guesses.tags == NOBODY).all() and not guesses.slots.lent
        assert not source._shelf.here[0]
        machine.check()


@pytest.mark.parametrize("at", range(1, 40))
def test_an_interrupt_anywhere_leaves_every_expert_whole(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the at-th call of the copier, or of what moves bytes."""
    machine = Machine(at, 0, "lru", plan=plan_of(4, 2))
    with machine.source as source:
        machine.step([[0, 1, 2], [3, 4, 5], [0, 2, 4]])
        source.warm(source.experts[::2])
        calls = itertools.count(1)
        for owner, name in ((machine.streams, "write"), (machine.streams, "drain"), (source._memory, "move")):
            real = getattr(owner, name)

            def call(*named: object, real: Callable[..., object] = real) -> object:
                if next(calls) == at:
                    raise KeyboardInterrupt
                return real(*named)

            monkeypatch.setattr(owner, name, call)
        with suppress(KeyboardInterrupt):
            page, _ = lender_of(source).take()
            lender_of(source).give_back(page)
        monkeypatch.undo()
        machine.step([[0, 1, 2], [3, 4, 5], [0, 2, 4]])
        machine.check()
        assert lender_of(source).counts().kv == 0


@pytest.mark.parametrize("at", range(1, 14))
def test_an_interrupt_costs_no_page_that_is_lent_and_no_entry(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step reads by itself, nobody writes the whole table anew."""
    with opened(4, 2) as source:
        source.warm(source.experts[:12])
        _, keys = lender_of(source).take()
        keys.fill_(0xA5)
        for number in (3, 4, 6, 7, 9, 10):  # the oldest lie in all pages: two have to move
            source.policy.touch(number, 20 + number)
        calls, copier = itertools.count(1), source._shelf.copier
        for owner, name in ((copier, "write"), (copier, "drain"), (source._memory, "move")):
            real = getattr(owner, name)

            def call(*named: object, real: Callable[..., object] = real) -> object:
                if next(calls) == at:
                    raise KeyboardInterrupt
                return real(*named)

            monkeypatch.setattr(owner, name, call)
        with suppress(KeyboardInterrupt):
            page, _ = lender_of(source).take()
            lender_of(source).give_back(page)
        monkeypatch.undo()
        source.check_integrity()
        source.warm(source.experts)  # into every slot there is
        source.check_integrity()
        assert all_here(source, [number for number, here in enumerate(source._shelf.here) if here])
        assert (keys == 0xA5).all() and lender_of(source).counts().kv == 1


def test_a_closed_source_lends_nothing() -> None:
    source = opened(3, 1)
    source.close()
    with pytest.raises(TransferError, match="closed"):
        lender_of(source).take()


def test_pages_may_hold_more_slots_than_there_are_experts() -> None:
    with opened(8, 2) as source:
        assert source.warm(source.experts) == COUNT and not source.resident
        pages = [lender_of(source).take()[0] for _ in range(2)]
        source.check_integrity()
        assert all_here(source, range(COUNT))  # 18 slots are left
        for page in pages:
            lender_of(source).give_back(page)
