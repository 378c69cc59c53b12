"""An interrupt between any two operations on the copy stream: the step is lost, and nothing else."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
