"""What a predictor expects: sent in its order, given up when it is not expected any more or its layer has come."""

import math
from collections.abc import Sequence

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.throttle import ENOUGH_SENT
from tests.transfer.cuda.blocks import NAMES
from tests.transfer.cuda.test_guesses import Slow, serve, slow, state  # noqa: F401  `slow` is a fixture


def expect(source: CudaSource, *experts: Sequence[int]) -> None:
    source.expect([(layer, expert) for layer, expert in experts])
    source.pump()


def moved(copier: Slow, source: CudaSource) -> set[ExpertId]:
    """Whose blocks, or parts of them, were copied."""
    places = source._shelf.places
    return {
        source.experts[max(n for n, place in enumerate(places) if place <= address)] for address, _, _ in copier.moved
    }


def test_what_is_not_expected_any_more_is_cut(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, _ = slow
    with source:
        expect(source, (2, 3))
        assert state(source, 2, 3) is Residency.LOADING
        expect(source, (4, 0))
        assert state(source, 2, 3) is Residency.ABSENT
        assert source.counters().prefetch.cancelled == 1


def test_who_asked_by_another_way_is_still_heard(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, _ = slow
    with source:
        assert source.prefetch([ExpertId(2, 3), ExpertId(4, 1)], Reason.PREFETCH, math.inf) == 2
        expect(source, (2, 5))
        expect(source)
        assert len(source._shelf.asked) + len(source._shelf.moving) == 2


def test_what_its_layer_did_not_want_moves_no_more(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        serve(source, [0], [0], [0])
        copier.drain()
        source.begin()
        expect(source, (2, 3), (2, 4))
        source.serve(2, [3])
        for _ in range(6):
            copier.drain()
            source.pump()
        assert ExpertId(2, 4) not in moved(copier, source)
        assert source.counters().prefetch.late == 1


def test_the_nearer_layer_goes_first_even_if_another_is_on_its_way(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        expect(source, (4, 1))
        copier.drain()
        before = len(copier.moved)
        expect(source, (2, 2), (4, 1))
        first = source._shelf.places[source._shelf.base[2] + 2]
        assert copier.moved[before][0] == first


def test_demand_spares_what_is_expected(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        expect(source, (4, 1))
        for _ in range(6):
            copier.drain()
            source.pump()
        assert state(source, 4, 1) is Residency.READY
        source.begin()
        source.serve(1, [0, 1, 2, 3])
        source.serve(2, [0, 1, 2, 3])  # all nine slots are taken
        source.serve(4, [0])
        assert state(source, 4, 1) is Residency.READY, "it lingers, and would be the first to go"
        copier.drain()


def test_guesses_that_are_never_used_are_not_sent_any_more(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, copier = slow
    with source:
        for _ in range(2 * ENOUGH_SENT):
            source.begin()
            expect(source, (2, 5))
            for layer in NAMES:
                source.serve(layer, [0])
            copier.drain()
        assert source.throttled
        before = len(copier.moved)
        expect(source, (2, 5))
        assert len(copier.moved) == before
