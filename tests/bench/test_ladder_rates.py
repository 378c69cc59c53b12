"""What a miss costs, found again in runs that a known machine would have made."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ladder_rates import Seen, replayed, solve_misses
from steerpipe.transfer.machine import Decoding, Machine
from steerpipe.transfer.recorded import Recording

MACHINE = Machine(
    slots=48, block_bytes=16384, link_bytes_per_second=16384 / 1e-4, layer_seconds=1e-3, expert_seconds=3e-5,
    beside_seconds=5e-5, ask_seconds=4e-4, decoding=Decoding(3e-4),
)  # fmt: skip
UNKNOWN = replace(MACHINE, ask_seconds=0.0, decoding=None)
SHARES = (0.05, 0.375, 0.75)
WARMUP = 10


def routing(seed: int) -> Recording:
    """Some experts are chosen more often than others, as in a model."""
    rng = np.random.default_rng(seed)
    weights = np.log(1 / np.arange(1, 17))
    rows = np.argsort(weights + rng.gumbel(size=(40, 3, 16)), axis=-1)[..., -4:]
    return Recording("drawn", rows, np.zeros(40, dtype=np.int32), 16)


def runs(machine: Machine) -> list[Seen]:
    """As long as that machine takes for them."""
    return [
        Seen(routing(1), share, replayed(machine, routing(1), share, WARMUP).tpot_median_seconds) for share in SHARES
    ]


def test_the_costs_of_a_miss_are_found_in_the_runs_they_made() -> None:
    solved = solve_misses(UNKNOWN, runs(MACHINE), WARMUP)
    assert solved.ask_seconds == pytest.approx(4e-4, rel=1e-6)
    assert solved.decoding is not None and solved.decoding.seconds == pytest.approx(3e-4, rel=1e-6)


def test_they_are_found_where_compute_hides_a_part_of_them() -> None:
    slow = {"expert_seconds": 3e-4, "beside_seconds": 4e-4}
    solved = solve_misses(replace(UNKNOWN, **slow), runs(replace(MACHINE, **slow)), WARMUP)  # type: ignore[arg-type]
    assert solved.ask_seconds == pytest.approx(4e-4, rel=1e-6)
    assert solved.decoding is not None and solved.decoding.seconds == pytest.approx(3e-4, rel=1e-6)


def test_no_cost_is_found_below_zero() -> None:
    """Runs of a link that is quicker than it says: the rest cannot be less than nothing."""
    quicker = replace(MACHINE, link_bytes_per_second=16384 / 5e-5, ask_seconds=0.0, decoding=None)
    solved = solve_misses(UNKNOWN, runs(quicker), WARMUP)
    assert solved.ask_seconds == 0.0
    assert solved.decoding == Decoding(0.0)


def test_another_text_at_another_budget_is_predicted_from_them() -> None:
    solved = solve_misses(UNKNOWN, runs(MACHINE), WARMUP)
    truth, guess = (replayed(each, routing(2), 0.25, WARMUP) for each in (MACHINE, solved))
    assert guess.tpot_median_seconds == pytest.approx(truth.tpot_median_seconds, rel=1e-6)
    assert guess.misses == truth.misses > 0
