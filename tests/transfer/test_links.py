"""Meters, pacing, faults and the RAM tier: what lies between the disk and the slots."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from steerpipe.transfer.link import BlockAddress, LinkMeter, OverLink, PacedLink, Piece
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.slabs import Slab

PAGE = 4096
BLOCKS = 8
ADDRESSES = [BlockAddress(ExpertId(0, index), index * PAGE, PAGE) for index in range(BLOCKS)]


class Clock:
    """Time that passes when somebody sleeps; every sleep lasts `late` longer than asked."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


class Counting(OverLink):
    def __init__(self, below: DiskLink) -> None:
        super().__init__(below)
        self.read_experts: list[int] = []

    def read(self, pieces: Sequence[Piece]) -> None:
        self.read_experts += [piece.address.expert.expert for piece in pieces]
        super().read(pieces)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(b"".join(bytes([index]) * PAGE for index in range(BLOCKS)))
    return path


@pytest.fixture
def below(file: Path) -> Counting:
    return Counting(DiskLink(file))


def piece(index: int) -> Piece:
    return Piece(ADDRESSES[index], 0, memoryview(mmap.mmap(-1, PAGE)))


def fetch(link: OverLink, *indices: int) -> None:
    """Reads, checks, and tells the link that the blocks are good."""
    wanted = [piece(index) for index in indices]
    link.read(wanted)
    for each, index in zip(wanted, indices, strict=True):
        assert bytes(each.into) == bytes([index]) * PAGE
        link.keep(ADDRESSES[index], each.into)


# --- meters


def test_a_meter_counts_overlapping_reads_once() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    with meter.reading(100):
        clock.now += 1
        with meter.reading(300):
            clock.now += 2
        clock.now += 1
    clock.now += 50
    found = meter.snapshot()
    assert (found.reads, found.read_bytes, found.busy_seconds) == (2, 400, 4.0)
    assert found.bytes_per_second == pytest.approx(100, rel=0.01)


def test_a_read_that_fails_counts_its_time_and_no_bytes() -> None:
    clock = Clock()
    meter = LinkMeter(clock)

    def fail() -> None:
        with meter.reading(100):
            clock.now += 3
            raise OSError

    with pytest.raises(OSError):
        fail()
    assert (meter.snapshot().busy_seconds, meter.snapshot().read_bytes, meter.snapshot().reads) == (3.0, 0, 0)


def test_the_rate_follows_what_the_link_does_lately() -> None:
    clock = Clock()
    meter = LinkMeter(clock)
    for seconds in [1.0] * 5 + [0.5] * 20:
        with meter.reading(64 << 20):
            clock.now += seconds
    assert meter.snapshot().bytes_per_second == pytest.approx(128 << 20, rel=0.01)


# --- pacing


@pytest.mark.parametrize("late", [0.0, 0.003])
def test_a_paced_link_keeps_its_rate_though_sleeps_end_late(below: Counting, late: float) -> None:
    clock = Clock(late)
    link = PacedLink(below, bytes_per_second=PAGE / 0.01, clock=clock, sleep=clock.sleep)
    begin = clock.now
    for index in range(50):
        fetch(link, index % BLOCKS)
    assert clock.now - begin == pytest.approx(0.5, abs=0.004)
    link.close()


def test_a_paced_link_does_not_save_up_idle_time(below: Counting) -> None:
    clock = Clock()
    link = PacedLink(below, bytes_per_second=PAGE / 0.01, clock=clock, sleep=clock.sleep)
    clock.now += 60
    fetch(link, 0)
    assert clock.slept == [pytest.approx(0.01)]
    link.close()


def test_a_paced_link_says_so(below: Counting) -> None:
    link = PacedLink(below, 1 << 20)
    assert "paced to 1 MiB/s" in link.name
    link.close()


# --- RAM


def test_what_ram_holds_is_not_read_again(below: Counting) -> None:
    tier = RamTier(below, ADDRESSES, 3 * PAGE)
    fetch(tier, 1, 2, 3)
    fetch(tier, 3, 2, 1)
    assert below.read_experts == [1, 2, 3]
    assert "3 of 8 blocks" in tier.name
    assert not tier.holds_everything
    tier.check_integrity()
    tier.close()


def test_ram_keeps_what_is_read_often_within_its_budget(below: Counting) -> None:
    tier = RamTier(below, ADDRESSES, 2 * PAGE + PAGE - 1)
    for index in (0, 0, 0, 1, 1, 2, 3, 4):
        fetch(tier, index)
    below.read_experts.clear()
    fetch(tier, 0)
    assert below.read_experts == []
    fetch(tier, 2)
    assert below.read_experts == [2]
    tier.check_integrity()
    tier.close()


def test_parts_of_a_run_come_from_ram_and_the_rest_from_below(below: Counting) -> None:
    tier = RamTier(below, ADDRESSES, 4 * PAGE)
    fetch(tier, 2)
    below.read_experts.clear()
    fetch(tier, 1, 2, 3)
    assert below.read_experts == [1, 3]
    tier.close()


def test_a_block_is_read_from_ram_in_chunks_too(below: Counting, tmp_path: Path) -> None:
    path = tmp_path / "two"
    path.write_bytes(os.urandom(4 * PAGE))
    places = [BlockAddress(ExpertId(0, index), index * 2 * PAGE, 2 * PAGE) for index in range(2)]
    tier = RamTier(DiskLink(path), places, 4 * PAGE)
    whole = memoryview(mmap.mmap(-1, 2 * PAGE))
    tier.read([Piece(places[1], 0, whole)])
    tier.keep(places[1], whole)
    chunk = memoryview(mmap.mmap(-1, PAGE))
    path.write_bytes(bytes(4 * PAGE))
    tier.read([Piece(places[1], PAGE, chunk)])
    assert bytes(chunk) == bytes(whole[PAGE:])
    tier.close()
    below.close()


def test_ram_that_holds_everything_is_filled_in_the_order_on_disk(below: Counting) -> None:
    tier = RamTier(below, reversed(ADDRESSES), BLOCKS * PAGE)
    assert tier.holds_everything

    def read(address: BlockAddress, slab: Slab) -> None:
        below.read([Piece(address, 0, slab.view[:PAGE])])

    tier.fill(read)
    assert below.read_experts == list(range(BLOCKS))
    fetch(tier, *range(BLOCKS))
    assert below.read_experts == list(range(BLOCKS))
    tier.close()


def test_a_block_that_turned_out_wrong_is_read_from_below_and_kept_anew(below: Counting) -> None:
    tier = RamTier(below, ADDRESSES, 4 * PAGE)
    wrong = memoryview(bytearray(b"\xff" * PAGE))
    tier.keep(ADDRESSES[5], wrong)
    tier.forget(ADDRESSES[5])
    fetch(tier, 5)
    assert below.read_experts == [5]
    fetch(tier, 5)
    assert below.read_experts == [5]
    tier.close()


def test_too_little_ram_for_two_blocks_is_an_error_that_says_how_much(below: Counting) -> None:
    with pytest.raises(ConfigError, match="holds 1 blocks of 4 KiB") as raised:
        RamTier(below, ADDRESSES, 2 * PAGE - 1)
    assert "8 KiB" in raised.value.fix
    below.close()


# --- faults


def test_planted_faults_strike_as_often_as_planned(below: Counting) -> None:
    ids = [address.expert for address in ADDRESSES]
    clock = Clock()
    faults = Faults(fails={ids[0]: 2}, shortens={ids[1]: 1}, corrupts={ids[2]: 1, ids[3]: ALWAYS})
    link = FaultyLink(below, faults, seed=1, sleep=clock.sleep)
    for _ in range(2):
        with pytest.raises(OSError, match="planted"):
            link.read([piece(0)])
    fetch(link, 0)
    with pytest.raises(OSError, match="short"):
        link.read([piece(1)])
    fetch(link, 1)
    for index, wrong in ((2, True), (2, False), (3, True), (3, True)):
        (each,) = wanted = [piece(index)]
        link.read(wanted)
        assert (bytes(each.into) != bytes([index]) * PAGE) == wrong
    assert clock.slept == []
    assert "faults" in link.name
    link.close()


def test_delays_and_stalls_are_seeded(below: Counting) -> None:
    slept = []
    for seed in (1, 1, 2):
        clock = Clock()
        link = FaultyLink(below, Faults(delay_seconds=1, stall_share=0.5, stall_seconds=10), seed, clock.sleep)
        for _ in range(20):
            fetch(link, 0)
        slept.append(clock.slept)
        assert any(seconds > 10 for seconds in clock.slept)
        assert any(seconds < 1 for seconds in clock.slept)
    assert slept[0] == slept[1] != slept[2]
    below.close()


def test_a_share_of_the_blocks_fails_at_the_first_read(below: Counting) -> None:
    link = FaultyLink(below, Faults(fail_share=1.0))
    with pytest.raises(OSError):
        link.read([piece(4)])
    fetch(link, 4)
    link.close()
