"""An interrupt anywhere, and another one while the first is mended: the step is lost, and nothing else."""

import dis
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.transfer.queue import Reason
from tests.transfer.cuda import test_landing as landing
from tests.transfer.cuda.blocks import EXPERTS, NAMES
from tests.transfer.cuda.test_streams import ALL, Machine


class Interrupt(BaseException):
    """As KeyboardInterrupt, which would end pytest where a test is wrong."""


def interrupt(machine: Machine, after: int) -> Callable[[], None]:
    """One interrupt, at the block or word that comes after so many; the result takes it back if it has not come."""
    streams, left = machine.streams, [after]

    def before(operation: Callable[..., None]) -> Callable[..., None]:
        def interrupted(*given: Any) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Interrupt
            operation(*given)

        return interrupted

    own = streams.copy, streams.write
    streams.copy, streams.write = before(streams.copy), before(streams.write)  # type: ignore[method-assign]

    def take_back() -> None:
        streams.copy, streams.write = own  # type: ignore[method-assign]

    return take_back


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, 2 * EXPERTS),
    limit=st.none() | st.integers(1, 6),
    after=st.integers(0, 40),
    served=st.booleans(),
)
def test_an_interrupted_step_costs_nothing_but_itself(
    seed: int, slots: int, limit: int | None, after: int, served: bool
) -> None:
    machine = Machine(seed, slots, (), limit)
    random = machine.streams._random
    routed = [random.sample(ALL, 2) for _ in NAMES]
    with machine.source as source:
        machine.serve(routed)
        take_back = interrupt(machine, after)
        with suppress(Interrupt):
            if served:
                machine.serve([random.sample(ALL, 2) for _ in NAMES], stopped_by=Interrupt)
            else:
                for layer in NAMES:
                    machine.lease(layer, random.sample(ALL, random.randint(2, 6)), random.sample(ALL, 2))
        take_back()
        source.check_integrity()
        for _ in range(2):
            machine.serve(routed)
            for layer in NAMES:
                assert sorted(machine.lease(layer, ALL, keep=[0])) == list(ALL)
        source.check_integrity()


@pytest.mark.parametrize("after", range(12))
def test_an_interrupt_while_experts_are_sent_ahead(after: int) -> None:
    machine = Machine(after, 12, transient_limit=6)

    def lease_then_interrupt() -> None:
        with machine.source.lease(NAMES[0], ALL, []) as lease:
            for wave in lease.waves():
                machine.streams.launch(machine.kernel(NAMES[0], wave, waits=False))
            undo.append(interrupt(machine, after))

    undo: list[Callable[[], None]] = []
    with machine.source as source:
        for layer in NAMES:
            machine.lease(layer, ALL, keep=[])
        with pytest.raises(Interrupt):
            lease_then_interrupt()
        undo[0]()
        machine.serve([[0, 1], [2, 3], [4, 5]])
        source.check_integrity()


def test_who_was_evicted_by_an_interrupted_lease_stays_in_the_table_until_its_kernels_have_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupt comes when the slot table knows of the eviction and nobody else does."""
    machine = Machine(0, 2)
    streams, source = machine.streams, machine.source
    begin = source._shelf.table.begin

    def interrupted(*given: Any, **named: Any) -> Any:
        placement = begin(*given, **named)
        if placement is not None and placement.evicted is not None:
            raise Interrupt
        return placement

    with source:
        with source.lease(NAMES[0], [0]) as lease:
            for wave in lease.waves():
                streams.drain()
                streams.launch(machine.kernel(NAMES[0], wave, waits=False))  # it has not begun to run
        with monkeypatch.context() as patch:
            patch.setattr(source._shelf.table, "begin", interrupted)
            with pytest.raises(Interrupt), source.lease(NAMES[1], [0, 1]) as lease:
                list(lease.waves())
        streams._copying = 1.0
        for _ in range(100):
            streams.step()
        streams._copying = 0.5
        streams.drain()
        source.check_integrity()


OURS = ("/steerpipe/transfer/cuda/", "/steerpipe/store/")
SIGNALS = ("RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX")  # after these the interpreter looks for signals


@contextmanager
def interrupted_after(chances: int) -> Iterator[None]:
    """As a signal would, at any instruction of the code under test where one can; so many pass before."""
    left, before, last = [chances], sys.gettrace(), dict[FrameType, str]()

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in OURS) or name.endswith("/ring.py"):
            return None  # the ring has locks: a tracer comes where no signal can, between a `with` and its end
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            left[0] -= last.get(frame) in SIGNALS
            if left[0] < 0:
                raise Interrupt  # which ends the tracing
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return step

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def lease_interrupted(machine: Machine, layer: int, routed: list[int], keep: list[int], after: int, again: int) -> None:
    lease = None
    try:
        with interrupted_after(after):
            lease = machine.source.lease(layer, routed, keep)
            for wave in lease.waves():
                machine.streams.launch(machine.kernel(layer, wave, waits=False))
                machine.streams.some()
    except Interrupt as problem:
        if lease is not None:
            with suppress(Interrupt), interrupted_after(again):
                lease.__exit__(Interrupt, problem, None)
    else:
        with suppress(Interrupt), interrupted_after(again):
            lease.__exit__(None, None, None)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, 2 * EXPERTS),
    limit=st.none() | st.integers(1, 6),
    in_ring=st.just(()) | st.just(tuple(range(3, 3 * EXPERTS, 4))),
    after=st.integers(0, 400),
    again=st.integers(0, 200),
    served=st.booleans(),
)
def test_an_interrupt_at_any_instruction_and_another_while_it_is_mended(
    seed: int, slots: int, limit: int | None, in_ring: tuple[int, ...], after: int, again: int, served: bool
) -> None:
    machine = Machine(seed, slots, in_ring, limit)
    random, source = machine.streams._random, machine.source
    routed = [random.sample(ALL, 2) for _ in NAMES]

    def release() -> None:
        with suppress(Interrupt), interrupted_after(again):
            source.release()

    with source:
        machine.serve(routed)
        machine.lease(NAMES[0], ALL, [])  # experts of the next layer are sent ahead
        if served:
            machine.let_go = release
            with suppress(Interrupt), interrupted_after(after):
                machine.serve([random.sample(ALL, 2) for _ in NAMES], stopped_by=Interrupt)
            machine.let_go = source.release
        else:
            lease_interrupted(machine, NAMES[1], random.sample(ALL, 5), random.sample(ALL, 2), after, again)
        for _ in range(2):
            machine.serve(routed)
            for layer in NAMES:
                assert sorted(machine.lease(layer, ALL, keep=[0])) == list(ALL)
        source.check_integrity()


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, 3 * EXPERTS - 1),
    after=st.integers(0, 400),
    again=st.integers(0, 200),
    served=st.booleans(),
)
def test_an_interrupt_while_a_step_is_followed_that_runs_by_itself(
    seed: int, slots: int, after: int, again: int, served: bool
) -> None:
    """What would mend it at once is interrupted too, or never begins: whoever comes next mends it."""
    machine = landing.Machine(seed, slots, chunk_bytes=1024)
    random, source = machine.streams._random, machine.source
    with source:
        machine.step([random.sample(ALL, 3) for _ in NAMES])
        source.prefetch(random.sample(source.experts, 5), Reason.PREFETCH, math.inf)
        with suppress(Interrupt), interrupted_after(after):
            machine.step([random.sample(ALL, 4) for _ in NAMES])
        machine.streams.drain()  # as the follower does
        if served:
            with suppress(Interrupt), interrupted_after(again):
                source.release()
        machine.streams.some()
        if served and source.serves(2):
            machine.serve([random.sample(ALL, 2) for _ in NAMES])
        for _ in range(2):
            machine.step([random.sample(ALL, 4) for _ in NAMES])
        machine.check()
