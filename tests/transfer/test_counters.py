"""Counters: snapshots that can be subtracted, written out, and that add up."""

import json
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

from steerpipe.transfer.counters import LadderCounters, Tally
from steerpipe.transfer.link import LinkRate
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.source import LadderSource
from tests.transfer.packs import tiny_pack


def test_a_snapshot_has_what_was_counted_and_does_not_change() -> None:
    tally = Tally()
    tally.of[Reason.PREFETCH].late += 2
    tally.leased += 5
    tally.misses += 3
    found = tally.snapshot(LinkRate(7, 100, 0.5), LinkRate(4, 60, 0.25), seconds=2.0)
    tally.leased += 1
    assert (found.leased, found.late, found.prefetch.late, found.misses) == (5, 2, 2, 3)
    assert (found.link_reads, found.link_seconds, found.disk_bytes, found.utilisation) == (7, 0.5, 60, 0.25)
    with pytest.raises(FrozenInstanceError):
        found.leased = 9  # type: ignore[misc]


def test_the_difference_of_two_snapshots_is_what_happened_between_them() -> None:
    tally = Tally()
    tally.leased, tally.of[Reason.DEMAND].read_bytes = 3, 10
    before = tally.snapshot(LinkRate(1, 10, 1.0), LinkRate(), 5.0)
    tally.leased, tally.of[Reason.DEMAND].read_bytes = 10, 40
    between = tally.snapshot(LinkRate(4, 40, 3.0), LinkRate(), 9.0) - before
    assert (between.leased, between.demand.read_bytes, between.link_reads) == (7, 30, 3)
    assert (between.seconds, between.utilisation) == (4.0, 0.5)


def test_counters_are_json_and_an_empty_interval_is_zero() -> None:
    with LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32) as source:
        with source.lease(0, [1, 2, 3]) as lease:
            list(lease.waves())
        source.check_integrity()
        counts = source.counters()
        assert json.loads(json.dumps(asdict(counts)))["demand"]["transfers"] == 3
        again = source.counters() - counts
        assert (again.leased, again.read_bytes, again.link_reads, again.stall_seconds) == (0, 0, 0, 0.0)
        assert counts.stall_seconds > 0
        assert counts.disk_bytes == counts.read_bytes == source.rate.read_bytes
        assert 0 < counts.disk_seconds <= counts.link_seconds <= counts.seconds
        assert source.rate.bytes_per_second > 0
    assert LadderCounters().utilisation == 0.0


def test_what_a_miss_waits_is_known_where_misses_wait() -> None:
    assert LadderCounters(misses=4, stall_seconds=2.0).miss_seconds == 0.5
    assert LadderCounters(stall_seconds=2.0).miss_seconds is LadderCounters(misses=4).miss_seconds is None
