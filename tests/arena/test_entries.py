import pytest

from steerpipe.arena.entries import Entry, Role, check_names, entries_of
from steerpipe.core.errors import InputError
from steerpipe.predict.bounds import Oracle, Random
from tests.arena.traces import Successor


class At(Successor):
    name = "one for each horizon"

    def __init__(self, horizon: int) -> None:
        self.horizons = (horizon,)  # type: ignore[assignment]  # one of them


def test_one_predictor_per_horizon_is_one_entry() -> None:
    (entry,) = entries_of([(At(1), "here"), (At(3), "here"), (At(2), "here")])
    assert sorted(entry.by_horizon) == [1, 2, 3]
    assert entry.ahead() == [1, 2, 3]
    assert len(entry.predictors) == 3


def test_two_for_one_horizon_are_refused() -> None:
    with pytest.raises(InputError, match="horizon 1"):
        entries_of([(At(1), "here"), (At(1), "here")])


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two entries are called 'successor': a file and a plugin"):
        check_names(entries_of([(Successor(), "a file"), (Successor(), "a plugin")]))


def test_in_the_simulator_a_gap_ends_what_is_known_and_horizon_0_stands_for_1_where_there_is_no_other() -> None:
    assert Entry("x", {1: At(1), 3: At(3)}).ahead() == [1]
    assert Entry("x", {0: At(0)}).ahead() == [0]
    assert Entry("x", {0: At(0), 1: At(1)}).ahead() == [1]
    assert Entry("x", {2: At(2)}).ahead() == []


def test_what_is_not_stored_has_no_training_and_cannot_be_moved() -> None:
    (entry,) = entries_of([(Random(), "bound")], Role.BOUND)
    assert entry.training() is None
    assert entry.moved("cpu") is None
    assert Entry("oracle", {1: Oracle()}).cost().parameters == 0
