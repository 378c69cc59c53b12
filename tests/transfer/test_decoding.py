"""The second stage of the simulated machine: a block that is whole is decoded by who has read it, then it lands.

Tc: compute of a layer; Tx: one block over the link; Td: decoding it.
"""

import pytest

from steerpipe.core.errors import ConfigError
from steerpipe.transfer.forecasts import PerfectPredictor
from steerpipe.transfer.machine import Decoding, Disk, Machine
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.synthetic import SyntheticRouting
from tests.transfer.simulating import BLOCK, AlwaysSeven, machine, one_text, recording, total_seconds

FOUR = recording([[[0, 1, 2, 3]]])
SMALL = one_text(draw_recording(SyntheticRouting(tokens=40, layers=4, experts=16, top_k=4)))


def test_one_reader_decodes_before_it_reads_on() -> None:
    spent = total_seconds(FOUR, machine(decoding=Decoding(0.25)), keep=Keep.NOTHING)
    assert spent == pytest.approx(0.5 + 4 * (1.0 + 0.25))


def test_of_two_readers_one_reads_while_the_other_decodes() -> None:
    spent = total_seconds(FOUR, machine(decoding=Decoding(0.25, readers=2)), keep=Keep.NOTHING)
    assert spent == pytest.approx(0.5 + 4 * 1.0 + 0.25)  # only the last decoding is seen


def test_where_decoding_is_longer_than_reading_the_readers_are_the_limit() -> None:
    """Reads end at .5, 1, 2, 2.5 after the router; decoding takes 1 from there."""
    spent = total_seconds(FOUR, machine(tx=0.5, decoding=Decoding(1.0, readers=2)), keep=Keep.NOTHING)
    assert spent == pytest.approx(0.5 + 3.5)


@pytest.mark.parametrize("keep", list(Keep))
def test_decoding_that_takes_no_time_changes_nothing(keep: Keep) -> None:
    predictor = PerfectPredictor(SMALL.routing, 2)
    without, instant = (
        replay(SMALL, machine(tx=0.3, decoding=decoding), keep=keep, predictor=predictor)
        for decoding in (None, Decoding(0.0))
    )
    assert instant.tpot_mean_seconds == pytest.approx(without.tpot_mean_seconds, rel=1e-9)
    assert (instant.hits, instant.late, instant.misses) == (without.hits, without.late, without.misses)


def test_the_link_counts_its_bytes_and_not_the_decoding() -> None:
    report = replay(FOUR, machine(decoding=Decoding(0.25)), keep=Keep.NOTHING)
    assert report.link_utilisation == pytest.approx(4.0 / 5.5)
    assert report.demand_bytes_per_token == 4 * BLOCK


def test_an_expert_is_computed_while_the_next_one_is_read_and_decoded() -> None:
    """Landings at 1.5 and 3 after the router; the first is computed from 1.5 to 2.5, the second from 3."""
    figures = machine(tx=0.5, expert_seconds=1.0, decoding=Decoding(1.0))
    assert total_seconds(recording([[[0, 1]]]), figures, keep=Keep.NOTHING) == pytest.approx(0.5 + 3.0 + 1.0)


def test_a_guess_that_is_demanded_while_it_is_decoded_lands_when_it_would_have() -> None:
    source = recording([[[0], [1]]])
    report = replay(
        source, machine(tc=1.25, decoding=Decoding(0.5)), "lru", predictor=PerfectPredictor(source.routing, 1)
    )
    assert (report.misses, report.late, report.hits) == (1, 1, 0)
    assert (report.demand_bytes_per_token, report.guess_bytes_per_token) == (BLOCK, BLOCK)
    assert report.tpot_mean_seconds == pytest.approx(1.25 + 1.5 + 1.5)  # the guess was read in 1.25 and decoded in .5


def test_a_wrong_guess_that_is_being_decoded_is_not_cut() -> None:
    source = recording([[[0], [1]]])
    figures = machine(tc=1.25, decoding=Decoding(0.5))
    report = replay(source, figures, "lru", predictor=AlwaysSeven())
    assert report.guess_bytes_per_token == BLOCK
    assert report.tpot_mean_seconds == pytest.approx(1.25 + 1.5 + 1.25 + 0.25 + 1.5)  # the reader is not free before


def test_a_layer_that_misses_asks_once() -> None:
    source = recording([[[0, 1]], [[0, 1]], [[0, 2]]])
    report = replay(source, machine(ask_seconds=0.125), "lru", warmup_tokens=1)
    assert report.tpot_mean_seconds * 2 == pytest.approx(0.5 + (0.5 + 0.125 + 1.0))


def test_what_needs_no_routed_expert_is_computed_while_they_are_read() -> None:
    """Tc .5, then two blocks of 1 s each, beside .75 s of a shared expert, or beside 3 s."""
    two = recording([[[0, 1]]])
    assert total_seconds(two, machine(beside_seconds=0.75), keep=Keep.NOTHING) == pytest.approx(0.5 + 2.0)
    assert total_seconds(two, machine(beside_seconds=3.0), keep=Keep.NOTHING) == pytest.approx(0.5 + 3.0)
    resident = replay(two, machine(beside_seconds=0.75), keep=Keep.ALL)
    assert resident.tpot_mean_seconds == pytest.approx(0.5 + 0.75) and resident.stall_seconds_per_token == 0
    missed = replay(two, machine(beside_seconds=0.75), keep=Keep.NOTHING)
    assert missed.stall_seconds_per_token == pytest.approx(1.25)
    with pytest.raises(ConfigError, match="beside_seconds"):
        machine(beside_seconds=-1.0)


def test_from_disk_through_ram_a_block_is_decoded_once() -> None:
    source = recording([[[0, 1, 2]]])
    figures = machine(disk=Disk(BLOCK / 2.0, ram_slots=8), decoding=Decoding(0.5))
    assert total_seconds(source, figures, "lru") == pytest.approx(0.5 + 3 * 2.0 + 1.0 + 0.5)


@pytest.mark.parametrize(("decoding", "name"), [
    (Decoding(-1.0), "decoding seconds"), (Decoding(0.0, readers=0), "readers"),
])  # fmt: skip
def test_decoding_that_cannot_be_is_refused(decoding: Decoding, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Machine(4, 10, 1.0, 0.0, decoding=decoding)
    assert name in caught.value.fix


def test_asking_takes_no_negative_time() -> None:
    with pytest.raises(ConfigError, match="ask_seconds"):
        Machine(4, 10, 1.0, 0.0, ask_seconds=-1.0)
