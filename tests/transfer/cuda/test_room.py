"""Slots for what comes next: taken of layers that have passed, and never of the layer that may still run."""

import pytest

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.source import CudaSource
from tests.transfer.cuda.blocks import NAMES
from tests.transfer.cuda.test_guesses import Slow, serve, slow, state  # noqa: F401  `slow` is a fixture


def test_demand_spares_the_layer_before_while_others_can_be_had(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, _ = slow
    with source:
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])  # all nine slots are taken
        source._shelf.table.touch_many(range(source._shelf.base[2], len(source.experts)), 100.0)
        source.begin()
        source.serve(1, [3, 4])
        source.serve(2, [3, 4])  # named before layer 1 has run, where predictions are committed
        assert [state(source, 1, each) for each in (3, 4)] == [Residency.READY] * 2, "the longest unused, but in use"


def test_the_words_of_a_layer_that_nobody_waits_for_yet_go_together(
    slow: tuple[CudaSource, Slow],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, copier = slow
    written: list[int] = []
    with source:
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])  # all nine slots are taken
        monkeypatch.setattr(copier, "write_many", lambda words: written.append(len(words)))
        source.begin()
        source.serve(1, [3, 4, 5])
        assert written == [1, 2, 3], "the first copy begins at once"
        written.clear()
        source.serve(2, [3, 4, 5], ahead=True)
        assert written == [3, 3], "victims out of the table, newcomers into it"
        monkeypatch.undo()
        source.release()


def test_room_is_made_of_layers_that_have_passed_and_not_of_what_is_expected(
    slow: tuple[CudaSource, Slow],  # noqa: F811
) -> None:
    source, copier = slow
    shelf = source._shelf
    with source:
        shelf.spare_slots = 4
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])
        copier.drain()
        source.begin()
        source.serve(1, [0])
        source.serve(2, [0])
        source.expect([(4, 0), (1, 1)])  # both are there: nothing is to be sent
        assert not shelf.table.free_slots
        source.pump()
        were = {ExpertId(layer, each) for layer in NAMES for each in (0, 1, 2)}
        assert were - set(source.residents) == {ExpertId(1, 0), ExpertId(1, 2)}
        assert shelf.cleared is not None, "the next step waits until its entry is out of the table"


def test_room_is_made_once_per_layer_and_only_where_somebody_predicts(slow: tuple[CudaSource, Slow]) -> None:  # noqa: F811
    source, _ = slow
    shelf = source._shelf
    with source:
        shelf.spare_slots = 4
        serve(source, [0, 1, 2], [0, 1, 2], [0, 1, 2])
        source.begin()
        source.serve(1, [0])
        source.serve(2, [0])
        source.pump()
        assert not shelf.table.free_slots, "nobody expects anything"
        source.expect([(4, 0)])
        source.pump()
        assert shelf.table.free_slots == 3, "all of the layer that has passed"
        for each in (3, 4, 5):
            shelf.table.begin(ExpertId(4, each), transient=False, now=3.0)
        shelf.passed = len(source.experts)
        source.pump()
        assert not shelf.table.free_slots, "not again before another layer has come"
