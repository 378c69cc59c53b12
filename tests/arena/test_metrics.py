"""The metrics against a slow reading of their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from steerpipe.arena.metrics import CALIBRATION_BINS, Metrics, Tally, merged
from steerpipe.core.errors import InputError


def drawn(rows: int, experts: int, top_k: int, seed: int, levels: int = 1000) -> tuple[NDArray[np.float32], ...]:
    random = np.random.default_rng(seed)
    probabilities = (random.integers(0, levels + 1, (rows, experts)) / levels).astype(np.float32)  # with ties
    routed = np.array([random.permutation(experts)[:top_k] for _ in range(rows)])
    weights = random.random((rows, top_k)).astype(np.float32) + 0.01
    missed = random.random((rows, top_k)) < 0.4
    return probabilities, routed, weights, missed


def tally(*arrays: NDArray[np.generic]) -> Tally:
    counted = Tally()
    counted.add(*(torch.from_numpy(each) for each in arrays))
    return counted


def slow(
    probabilities: NDArray[np.float32],
    routed: NDArray[np.int64],
    weights: NDArray[np.float32],
    missed: NDArray[np.bool],
) -> dict[str, float]:
    rows, experts = probabilities.shape
    k = routed.shape[1]
    sums = dict.fromkeys(("top_1", "recall", "recall_wider", "recall_double", "jaccard", "perfect", "gate_mass"), 0.0)
    caught = lost = 0
    for row in range(rows):
        ranked = sorted(range(experts), key=lambda each: (-probabilities[row, each], each))
        truth, named = set(routed[row].tolist()), set(ranked[:k])
        sums["top_1"] += ranked[0] in truth
        sums["recall"] += len(truth & named) / k
        sums["recall_wider"] += len(truth & set(ranked[: k + 2])) / k
        sums["recall_double"] += len(truth & set(ranked[: 2 * k])) / k
        sums["jaccard"] += len(truth & named) / len(truth | named)
        sums["perfect"] += truth == named
        covered = sum(float(w) for e, w in zip(routed[row], weights[row], strict=True) if int(e) in named)
        sums["gate_mass"] += covered / float(weights[row].sum(dtype=np.float64))
        lost += int(missed[row].sum())
        caught += sum(int(e) in named for e, gone in zip(routed[row], missed[row], strict=True) if gone)
    found = {name: total / rows for name, total in sums.items()}
    return found | ({"recall_on_misses": caught / lost} if lost else {})


def slow_calibration(probabilities: NDArray[np.float32], truth: NDArray[np.bool]) -> float:
    said, so = probabilities.ravel().astype(np.float64), truth.ravel()
    bins = np.minimum((said * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    error = 0.0
    for index in range(CALIBRATION_BINS):
        inside = bins == index
        if inside.any():
            error += inside.mean() * abs(said[inside].mean() - so[inside].mean())
    return error


def truth_of(routed: NDArray[np.int64], experts: int) -> NDArray[np.bool]:
    truth = np.zeros((len(routed), experts), dtype=bool)
    np.put_along_axis(truth, routed, True, axis=1)
    return truth


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12), top_k=st.integers(1, 4), more=st.integers(1, 9), seed=st.integers(0, 99),
    levels=st.sampled_from([2, 1000]),
)  # fmt: skip
def test_every_metric_is_its_definition(rows: int, top_k: int, more: int, seed: int, levels: int) -> None:
    arrays = drawn(rows, top_k + more, top_k, seed, levels)
    found = tally(*arrays).metrics()
    for name, expected in slow(*arrays).items():
        assert getattr(found, name) == pytest.approx(expected, abs=1e-6), name
    assert found.decisions == rows
    assert found.missed == arrays[3].sum()


def test_calibration_error_is_its_definition_over_all_and_over_the_chosen() -> None:
    probabilities, routed, *_ = drawn(50, 12, 3, 7)
    truth = truth_of(routed, 12)
    found = tally(probabilities, routed).metrics()
    assert found.calibration_error == pytest.approx(slow_calibration(probabilities, truth), abs=1e-9)
    chosen = np.argsort(-probabilities, axis=1, kind="stable")[:, :3]
    expected = slow_calibration(np.take_along_axis(probabilities, chosen, 1), np.take_along_axis(truth, chosen, 1))
    assert found.calibration_error_chosen == pytest.approx(expected, abs=1e-9)


def test_bins_of_a_calibrated_predictor_lie_on_the_diagonal() -> None:
    random = np.random.default_rng(3)
    rate = 0.3
    counted = Tally()
    truth = random.random((4000, 1)) < rate  # one expert of two is routed to: expert 0 in 30 % of the rows
    counted.add(torch.tensor([[rate, 1 - rate]]).expand(4000, 2), torch.from_numpy(np.where(truth, 0, 1)))
    for each in counted.calibration():
        assert each.said == pytest.approx(each.happened, abs=0.03)
    assert sum(each.count for each in counted.calibration()) == 8000


def test_tallies_merge_to_what_one_of_all_has() -> None:
    arrays = drawn(40, 10, 2, 11)
    parts = [tally(*(each[start : start + 13] for each in arrays)) for start in range(0, 40, 13)]
    whole, together = tally(*arrays).metrics(), merged(parts).metrics()
    for name, value in whole.as_json().items():
        assert getattr(together, name) == pytest.approx(value), name


def test_the_truth_itself_scores_one_everywhere() -> None:
    _, routed, weights, missed = drawn(30, 9, 3, 5)
    found = tally(truth_of(routed, 9).astype(np.float32), routed, weights, missed).metrics()
    shares = (found.top_1, found.recall, found.recall_wider, found.recall_double, found.jaccard, found.perfect)
    assert shares == (1.0,) * 6
    assert found.gate_mass == pytest.approx(1.0)
    assert found.recall_on_misses == 1.0
    assert found.calibration_error == 0.0


def test_without_weights_and_cache_nothing_is_claimed_about_them() -> None:
    probabilities, routed, *_ = drawn(5, 6, 2, 0)
    found: Metrics = tally(probabilities, routed).metrics()
    assert found.gate_mass is None
    assert found.recall_on_misses is None


@pytest.mark.parametrize("wrong", [float("nan"), 1.5, -0.1])
def test_what_is_no_probability_is_refused_by_name(wrong: float) -> None:
    probabilities, routed, *_ = drawn(5, 6, 2, 0)
    probabilities[2, 3] = wrong
    counted = tally(probabilities, routed)
    with pytest.raises(InputError, match="1 of 5 decisions"):
        counted.metrics()
