"""Misses that a CPU computes where they lie while the link brings the others, on the virtual clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import ConfigError
from steerpipe.transfer.comparison import ReplayOptions, compare
from steerpipe.transfer.machine import Decoding, Disk
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting
from tests.transfer.simulating import machine, recording, total_seconds

FOUR = recording([[[0, 1, 2, 3]]])  # tc 0.5, tx 1


@pytest.mark.parametrize(
    ("cpu_seconds", "spent", "computed"), [(1.0, 2.0, 2), (0.25, 1.0, 4), (3.0, 3.0, 1), (9.0, 4.0, 0)]
)
def test_link_and_cpu_share_the_misses_so_that_both_end_soonest(
    cpu_seconds: float, spent: float, computed: int
) -> None:
    report = replay(FOUR, machine(cpu_seconds=cpu_seconds), by_cpu=True)
    assert report.tpot_mean_seconds == pytest.approx(0.5 + spent)
    assert (report.misses, report.computed) == (4, computed)
    assert report.demand_bytes_per_token == 1000 * (4 - computed)


def test_the_strongest_choices_come_and_stay() -> None:
    twice = recording([[[0, 1, 2, 3]], [[0, 1, 4, 5]]])
    report = replay(twice, machine(cpu_seconds=1.0), by_cpu=True)
    assert report.hits == 2


def test_what_is_on_the_disk_only_is_not_computed() -> None:
    figures = machine(cpu_seconds=0.1, disk=Disk(1000.0, 24))
    assert replay(FOUR, figures, by_cpu=True).computed == 0
    assert replay(FOUR, replace(figures, disk=None), by_cpu=True).computed > 0


def test_what_a_cpu_computed_is_no_expert_of_the_device() -> None:
    report = replay(FOUR, machine(cpu_seconds=1.0, expert_seconds=0.1), by_cpu=True)
    assert report.stall_seconds_per_token == pytest.approx(1.9)


def test_a_cpu_begins_when_the_layer_has_asked() -> None:
    assert total_seconds(FOUR, machine(cpu_seconds=0.25, ask_seconds=0.4), by_cpu=True) == pytest.approx(0.5 + 0.4 + 1)


def test_a_block_that_is_decoded_costs_the_link_both() -> None:
    assert replay(FOUR, machine(cpu_seconds=2.0, decoding=Decoding(1.0)), by_cpu=True).computed == 2


def test_a_cpu_that_nobody_asks_computes_nothing() -> None:
    assert total_seconds(FOUR, machine(cpu_seconds=0.1)) == total_seconds(FOUR, machine())


def test_a_comparison_has_a_row_for_the_cpu_where_there_is_one() -> None:
    names = [run.name for run in compare(FOUR, ReplayOptions(machine(cpu_seconds=0.5), policies=("lfru",))).runs]
    assert names == ["on demand", "lfru", "lfru + cpu", "belady", "belady + cpu", "all resident"]


def test_a_machine_without_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="without one"):
        replay(FOUR, machine(), by_cpu=True)
    with pytest.raises(ConfigError, match="cpu_seconds"):
        machine(cpu_seconds=-1.0)


@settings(deadline=None, max_examples=40)
@given(cpu_seconds=st.floats(0.0, 5.0), more=st.floats(0.0, 5.0), seed=st.integers(0, 20))
def test_a_cpu_never_makes_a_first_token_slower_and_a_slower_one_never_quicker(
    cpu_seconds: float, more: float, seed: int
) -> None:
    """Of one token: later ones may miss what a CPU computed and nobody kept."""
    source = draw_recording(SyntheticRouting(tokens=1, layers=4, experts=12, top_k=3, seed=seed))
    spent = [
        total_seconds(source, machine(cpu_seconds=each), by_cpu=True) for each in (cpu_seconds, cpu_seconds + more)
    ]
    assert spent[0] <= spent[1] + 1e-9 <= total_seconds(source, machine()) + 2e-9
