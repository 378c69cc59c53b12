"""What is sent behind a step's last layer: as much as comes before the next one asks, and nobody waits for it."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.guesses import MOST_LAST
from steerpipe.transfer.cuda.source import CudaSource
from tests.transfer.cuda import test_landing as landing
from tests.transfer.cuda.blocks import EXPERTS, NAMES, PAGE
from tests.transfer.cuda.test_guesses import WINDOW, Slow, serve, slow, state  # noqa: F401  `slow` is a fixture
from tests.transfer.cuda.test_interrupts import Interrupt, interrupted_after
from tests.transfer.cuda.test_streams import ALL, Machine

CHUNK = PAGE // 4


def send(source: CudaSource, copier: Slow, *experts: tuple[int, int]) -> int:
    """Bytes that are queued behind a step."""
    serve(source, [0], [0], [0])
    copier.drain()
    before = len(copier.moved)
    source.expect(experts)
    source.send_last()
    return sum(size for _, _, size in copier.moved[before:])


def test_it_is_a_chunk_at_first_and_goes_on_where_it_stands(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        assert send(source, copier, (1, 3), (2, 3)) == CHUNK
        assert state(source, 1, 3) is Residency.LOADING and state(source, 2, 3) is Residency.ABSENT
        source.begin()
        source.serve(1, [3])
        assert source.counters().prefetch.late == 1
        assert copier.moved[-2][2] == PAGE - CHUNK and copier.moved[-1][2] == CHUNK, "the next one goes on as ever"


def test_blocks_are_sent_in_their_order_as_far_as_there_is_time(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        source._shelf._last_bytes = PAGE + CHUNK
        assert send(source, copier, (1, 0), (1, 3), (2, 3), (4, 3)) == PAGE + CHUNK, "(1, 0) is there"
        assert state(source, 1, 3) is Residency.READY
        assert source._shelf.moving.keys() == {source._shelf.base[2] + 3}
        assert state(source, 4, 3) is Residency.ABSENT


def test_more_is_sent_while_it_comes_in_time_and_twice_as_much_less_when_it_does_not(
    slow: tuple[CudaSource, Slow],  # noqa: F811
) -> None:
    source, copier = slow
    shelf = source._shelf
    with source:
        shelf._last_bytes = 2 * CHUNK
        send(source, copier, (1, 3))
        copier.drain()
        serve(source, [0], [0], [0])
        assert shelf._last_bytes == 2 * CHUNK + CHUNK // 4
        serve(source, [0], [0], [0])
        assert shelf._last_bytes == 2 * CHUNK + CHUNK // 4, "nothing was sent: nothing is known"
        send(source, copier, (1, 3))
        serve(source, [0], [0], [0])
        assert shelf._last_bytes == 2 * CHUNK - CHUNK // 4
        for _ in range(4):
            send(source, copier, (1, 3))
            serve(source, [0], [0], [0])
        assert shelf._last_bytes == CHUNK
        shelf._last_bytes = MOST_LAST * CHUNK
        shelf._last = Mark(0, 1)
        shelf.judge_last()
        assert shelf._last_bytes == MOST_LAST * CHUNK


def test_what_was_sent_in_full_says_nothing_of_the_time(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        source._shelf._last_bytes = 3 * PAGE
        assert send(source, copier, (1, 3), (2, 3)) == 2 * PAGE
        copier.drain()
        serve(source, [3], [3], [0])
        assert source._shelf._last_bytes == 3 * PAGE
        assert source.counters().prefetch.hits == 2


def test_the_next_step_waits_for_victims_and_not_for_blocks(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    shelf = source._shelf
    with source:
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])  # all nine slots are taken
        shelf._last_bytes = PAGE
        before = len(copier.moved)
        source.expect([(4, 5)])
        source.send_last()
        assert state(source, 4, 5) is Residency.READY and len(source.residents) == 9
        assert shelf.cleared is not None and shelf._last is not None
        moved = [copier.moved_before[mark.ordinal] for mark in (shelf.cleared, shelf._last)]
        assert moved == [before, before + 1]


def test_served_steps_in_a_row_do_not_wait_for_the_copy_stream() -> None:
    machine = landing.Machine(0, 14, "lru")
    with machine.source as source:
        machine.step([[0], [0], [0]])
        machine.serve([[1], [1], [1]])
        machine.streams.drain()
        machine.streams._copying = 0.0  # the copy stream stands still
        source.expect([(2, 5)])
        source.send_last()
        source.begin()
        found: list[int] = []
        machine.streams.launch(lambda: not found.append(1))  # type: ignore[func-returns-value]
        machine.streams.some(1000)
        assert found, "what is on its way is of no step that the device ran by itself"
        machine.streams._copying = 0.5
        source.release()
        machine.check()


def test_what_lies_in_no_pinned_memory_is_left_to_its_ring(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        number = source._shelf.base[1] + 3
        place, source._shelf.places[number] = source._shelf.places[number], 0
        assert send(source, copier, (1, 3)) == 0
        assert ExpertId(1, 3) not in source.residents and number in source._shelf.asked
        source.expect(())
        source._shelf.places[number] = place


def test_a_guess_that_moves_already_goes_on_first(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    shelf = source._shelf
    with source:
        serve(source, [0], [0], [0])
        copier.drain()
        source.expect([(1, 3), (2, 3)])
        source.pump()
        copier.drain()
        shelf._last_bytes = PAGE
        source.send_last()
        assert [size for _, _, size in copier.moved[-2:]] == [PAGE - WINDOW * CHUNK, WINDOW * CHUNK]
        assert state(source, 1, 3) is Residency.READY and state(source, 2, 3) is Residency.LOADING


def test_what_comes_before_the_next_served_step_says_nothing_of_the_time(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    shelf = source._shelf
    with source:
        shelf._last_bytes = 2 * CHUNK
        for between in (lambda: source.lease(2, [0]).__exit__(None, None, None), lambda: source.attend(8)):
            source.attend(7)
            send(source, copier, (1, 3))
            assert shelf._last is not None
            between()
            copier.drain()
            serve(source, [0], [0], [0])
            assert shelf._last_bytes == 2 * CHUNK


def test_guesses_of_another_predictor_are_not_settled_as_ones_own(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        source.attend(1)
        send(source, copier, (1, 3))
        source.attend(2)
        before = source._shelf.throttle._sent
        serve(source, [0], [0], [0])
        assert source._shelf.throttle._sent == before
        source.attend(2)
        send(source, copier, (1, 4))
        source.attend(2)
        serve(source, [0], [0], [0])
        assert source._shelf.throttle._sent == before + 1


@settings(max_examples=150)
@given(seed=st.integers(0, 1000), slots=st.integers(6, 17), after=st.integers(0, 300), released=st.booleans())
def test_an_interrupt_is_mended_even_if_nobody_was_told(seed: int, slots: int, after: int, released: bool) -> None:
    """As by a second one, before the first was heard of."""
    machine = Machine(seed, slots, (), None)
    random = machine.streams._random
    with machine.source as source:
        for _ in range(3):
            machine.serve([random.sample(ALL, 2) for _ in NAMES])
        source._shelf._last_bytes = random.randint(1, 12) * CHUNK
        experts = [(random.choice(NAMES), random.randrange(EXPERTS)) for _ in range(6)]
        try:
            with interrupted_after(after):
                source.expect(experts)
                source.pump()
                source.send_last()
        except Interrupt:
            if released:
                source.release()
        for _ in range(3):
            machine.serve([random.sample(ALL, 3) for _ in NAMES])
        source.check_integrity()


@settings(max_examples=100)
@given(seed=st.integers(0, 1000), after=st.integers(0, 200), lag=st.sampled_from([0.003, 0.03, 0.2]))
def test_a_step_whose_beginning_was_interrupted_still_waits_for_direct_ones(seed: int, after: int, lag: float) -> None:
    machine = landing.Machine(seed, 14, chunk_bytes=CHUNK)
    random = machine.streams._random
    machine.streams._copying = lag
    with machine.source as source:
        for _ in range(3):
            machine.step([random.sample(ALL, 3) for _ in NAMES])
        with suppress(Interrupt), interrupted_after(after):
            source.begin()
        for _ in range(2):
            machine.serve([random.sample(ALL, 3) for _ in NAMES])
        machine.check()
