"""How answers begin and where tokens go, counted while a model answers: as by hand, and kept from run to run."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from steerpipe.predict import running_openings
from steerpipe.predict.running_openings import LEAST_MET, MOST_AT_ONCE, RunningOpenings

LAYERS, EXPERTS, TOP_K = 3, 6, 2
OFTEN, SELDOM = 11, 12


def step(counts: RunningOpenings, tokens: list[int], seed: int, *, begin: bool = False) -> NDArray[np.int64]:
    """One step of as many answers; where its layers were routed [L, V, k]."""
    draw = np.random.default_rng(seed)
    routed = np.stack([[draw.permutation(EXPERTS)[:TOP_K] for _ in tokens] for _ in range(LAYERS)])
    counts.add(tokens, routed, np.full(len(tokens), begin))
    return routed


def filled() -> tuple[RunningOpenings, NDArray[np.float64], NDArray[np.float64]]:
    """With the uses of the token that came often [L, E], and of the beginnings [L, E], by hand."""
    counts = RunningOpenings(LAYERS, EXPERTS)
    often, begun = np.zeros((LAYERS, EXPERTS)), np.zeros((LAYERS, EXPERTS))
    for number in range(LEAST_MET + 4):
        tokens = [OFTEN, SELDOM, OFTEN] if number < 3 else [OFTEN]
        routed = step(counts, tokens, number, begin=number < 5)
        for layer in range(LAYERS):
            for row, token in enumerate(tokens):
                often[layer, routed[layer, row]] += token == OFTEN
                begun[layer, routed[layer, row]] += number < 5
    return counts, often, begun


def test_the_table_says_what_was_counted() -> None:
    counts, often, begun = filled()
    table = counts.table()
    assert table is not None and table.tokens.tolist() == [OFTEN]
    met = LEAST_MET + 4 + 3
    np.testing.assert_allclose(table.answer, begun / (3 * 3 + 2), rtol=1e-6)
    told = table.routing_of({OFTEN: 1.0, SELDOM: 1.0})
    kept = np.argsort(-often, axis=1, kind="stable")[:, : running_openings.TOLD]
    for layer in range(LAYERS):
        np.testing.assert_allclose(told[layer, kept[layer]], often[layer, kept[layer]] / met, atol=0.5 / 255)
        assert not np.delete(told[layer], kept[layer]).any()


def test_before_an_answer_has_begun_there_is_nothing_to_tell() -> None:
    counts = RunningOpenings(LAYERS, EXPERTS)
    step(counts, [OFTEN], 0)
    assert counts.table() is None


def test_a_run_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "made" / "o.npz", "abc")
    again = RunningOpenings.load(tmp_path / "made" / "o.npz", "abc", LAYERS, EXPERTS)
    for each in (counts, again):
        step(each, [OFTEN, OFTEN], 99, begin=True)
    first, second = counts.table(), again.table()
    assert first is not None and second is not None
    for name in ("answer", "tokens", "experts", "rates"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_what_came_seldom_is_in_no_file(tmp_path: Path) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "o.npz", "abc")
    with np.load(tmp_path / "o.npz") as found:
        assert found["tokens"].tolist() == [OFTEN]


@pytest.mark.parametrize("where", [0, 40, 200, -30])
def test_a_damaged_file_is_left_aside(tmp_path: Path, where: int) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "o.npz", "abc")
    content = (tmp_path / "o.npz").read_bytes()
    (tmp_path / "o.npz").write_bytes(content[:where])
    assert RunningOpenings.load(tmp_path / "o.npz", "abc", LAYERS, EXPERTS).table() is None


@pytest.mark.parametrize(
    ("source", "layers", "experts"), [("other", LAYERS, EXPERTS), ("abc", LAYERS + 1, EXPERTS), ("abc", LAYERS, 4)]
)
def test_a_file_of_another_model_is_left_aside(tmp_path: Path, source: str, layers: int, experts: int) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "o.npz", "abc")
    assert RunningOpenings.load(tmp_path / "o.npz", source, layers, experts).table() is None


@pytest.mark.parametrize(
    "change",
    [
        {"met": np.zeros(7, np.uint32)}, {"tokens": np.array([[1]], np.int32)}, {"answer_tokens": np.array(-1)},
        {"experts": np.full((1, LAYERS, EXPERTS), 200, np.uint16)}, {"answer": np.full((LAYERS, EXPERTS), np.nan)},
        {"uses": np.zeros((1, LAYERS), np.uint16)}, {"answer_tokens": np.array([1, 2])}, {"answer": None},
        {"experts": np.zeros((1, LAYERS, EXPERTS), np.float32)}, {"stranger": np.zeros(1)},
    ],
    ids=lambda change: str(next(iter(change))),
)  # fmt: skip
def test_a_file_that_does_not_fit_together_is_left_aside(tmp_path: Path, change: dict[str, object]) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "o.npz", "abc")
    with np.load(tmp_path / "o.npz") as found:
        content = {name: found[name] for name in found} | change
    np.savez(tmp_path / "o.npz", **{name: value for name, value in content.items() if value is not None})  # type: ignore[arg-type]
    assert RunningOpenings.load(tmp_path / "o.npz", "abc", LAYERS, EXPERTS).table() is None


def test_no_flipped_bit_is_an_error(tmp_path: Path) -> None:
    counts, _, _ = filled()
    counts.save(tmp_path / "o.npz", "abc")
    content, draw = (tmp_path / "o.npz").read_bytes(), np.random.default_rng(0)
    for bit in draw.integers(0, 8 * len(content), 400).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "o.npz").write_bytes(flipped)
        table = RunningOpenings.load(tmp_path / "o.npz", "abc", LAYERS, EXPERTS).table()
        assert table is None or table.answer.shape == (LAYERS, EXPERTS)


def test_where_every_row_is_taken_who_was_met_least_makes_room() -> None:
    counts = RunningOpenings(LAYERS, EXPERTS)
    counts._room = 2 * MOST_AT_ONCE  # as if there were less memory
    for number in range(LEAST_MET):
        step(counts, [OFTEN], number, begin=True)
    for first in range(1000, 1000 + 8 * MOST_AT_ONCE, MOST_AT_ONCE):
        step(counts, list(range(first, first + MOST_AT_ONCE)), first)
    assert len(counts._rows) <= 2 * MOST_AT_ONCE and sorted(counts._rows.values()) == list(range(len(counts._rows)))
    table = counts.table()
    assert table is not None and OFTEN in table.tokens


def test_a_count_that_is_full_halves_all_of_them() -> None:
    counts = RunningOpenings(LAYERS, EXPERTS)
    step(counts, [OFTEN], 0, begin=True)
    counts._uses[counts._rows[OFTEN]] = np.iinfo(np.uint16).max - 1
    counts._met[counts._rows[OFTEN]] = np.iinfo(np.uint16).max - 1
    step(counts, [OFTEN, OFTEN], 1)
    assert counts._uses[counts._rows[OFTEN]].min() >= (1 << 15) - 2 and counts._uses.max() <= (1 << 15) + 2
    table = counts.table()
    assert table is not None and table.rates.min() >= 254  # all of its uses are still all of its occurrences
