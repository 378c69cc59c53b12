"""The table of how answers begin: what it says, and that a damaged one is told."""

from pathlib import Path

import numpy as np
import pytest

from steerpipe.core.errors import InputError
from steerpipe.predict.openings import OpeningTable, find_openings, load_openings, save_openings
from steerpipe.runtime.models import EMBEDDED


def table() -> OpeningTable:
    answer = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], np.float32)
    experts = np.array([[[2], [0]], [[1], [1]]], np.uint8)
    return OpeningTable(answer, np.array([7, 9], np.int32), experts, np.array([[[255], [51]], [[0], [255]]], np.uint8))


def test_tokens_are_routed_as_often_as_they_come() -> None:
    found = table().routing_of({7: 2.0, 9: 0.5, 11: 5.0})
    assert np.allclose(found, [[0, 0, 2.0], [0.4, 0.5, 0]])


def test_without_a_prompt_an_answer_begins_as_answers_do() -> None:
    assert np.allclose(table().forecast(np.zeros((2, 3)), 0) * 1.3, table().answer)


def test_the_prompts_routing_counts_per_token() -> None:
    routed = np.array([[0, 0, 30.0], [30.0, 0, 0]])
    found = table().forecast(routed, 10) * 1.3
    assert np.allclose(found - table().answer, 0.3 * routed / 10)


def test_an_unknown_model_has_its_prompt_and_nothing_else() -> None:
    unknown = OpeningTable.unknown(2, 3)
    assert not unknown.routing_of({7: 1.0}).any()
    assert unknown.forecast(np.ones((2, 3)), 4).min() > 0


def test_a_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    save_openings(tmp_path / "openings.npz", table())
    found = load_openings(tmp_path / "openings.npz")
    assert np.array_equal(found.answer, table().answer) and np.array_equal(found.experts, table().experts)
    assert np.array_equal(found.routing_of({7: 1.0}), table().routing_of({7: 1.0}))


@pytest.mark.parametrize("damage", ["cut", "text", "expert", "shape"])
def test_a_damaged_file_is_told(tmp_path: Path, damage: str) -> None:
    file, good = tmp_path / "openings.npz", table()
    if damage == "expert":
        good.experts[0, 0, 0] = 3
    save_openings(file, good)
    if damage == "shape":
        np.savez(file, answer=good.answer, tokens=good.tokens[:1], experts=good.experts, rates=good.rates)
    if damage in ("cut", "text"):
        file.write_bytes(file.read_bytes()[:100] if damage == "cut" else b"openings")
    with pytest.raises(InputError, match="is no table of openings"):
        load_openings(file)


def test_the_embedded_model_has_one_and_a_folder_has_none(tmp_path: Path) -> None:
    found = find_openings(EMBEDDED)
    assert found is not None and found.answer.shape == (24, 60)
    assert np.allclose(found.answer.sum(axis=1), 4, atol=0.02), "top-4 of every layer"
    assert find_openings(tmp_path) is None
