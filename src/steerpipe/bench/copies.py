"""Copies to a device and back, timed: by the GPU's clock where the host's would count its own calls."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from steerpipe.core.machine import read_cores
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.ring import Ring
from steerpipe.transfer.cuda.stream import CudaCopier
from steerpipe.transfer.slabs import Slab

IDS = 8
_RING_BYTES = 8 << 20  # of a block
_ROUND_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Pinned memory to the device, blocks of one size. Rates in bytes per second."""

    block_bytes: int
    single: float  # one copy on an idle link
    queued: float  # back to back, neighbours in memory
    scattered: float  # back to back, sources and targets in any order
    issue_seconds: float  # of the host, per copy


@dataclass(frozen=True, slots=True)
class EntryCost:
    """Seconds per block, queued back to back: what clearing and setting an entry of the table adds to a copy."""

    block_bytes: int
    alone: float
    with_entries: float


def measure_entries(copier: Copier, arena: PinnedArena, into: torch.Tensor, size: int, rounds: int) -> EntryCost:
    """As serving does it: entry of the victim, block, entry of the newcomer."""
    places = list(range(0, arena.size_bytes - size + 1, size))[:32]
    words = torch.zeros(2 * len(places), dtype=torch.int64, device=into.device)
    copier.drain()
    first, address, target = words.data_ptr(), arena.address, into.data_ptr()

    def run(entries: bool) -> None:
        for index, place in enumerate(places):
            if entries:
                copier.write(first + 16 * index, 0)
            copier.copy(address + place, target + place, size)
            if entries:
                copier.write(first + 16 * index + 8, target + place)

    def per_block(entries: bool) -> float:
        return statistics.median(_timed(copier, lambda: run(entries)) for _ in range(rounds)) / len(places)

    return EntryCost(size, per_block(False), per_block(True))


def measure_size(copier: Copier, arena: PinnedArena, into: torch.Tensor, size: int, rounds: int) -> CopyRate:
    places = list(range(0, arena.size_bytes - size + 1, size))[: max(1, min(512, _ROUND_BYTES // size))]
    sources, targets = places.copy(), places.copy()
    one = [_timed(copier, lambda: copier.copy(arena.address, into.data_ptr(), size)) for _ in range(4 * rounds)]
    issued: list[float] = []

    def all_of_them() -> None:
        begin = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            copier.copy(arena.address + source, into.data_ptr() + target, size)
        issued.append((time.perf_counter() - begin) / len(places))

    queued = [_timed(copier, all_of_them) for _ in range(rounds)]
    Random(size).shuffle(sources)
    Random(size + 1).shuffle(targets)
    scattered = [_timed(copier, all_of_them) for _ in range(rounds)]
    total = len(places) * size
    return CopyRate(
        size, size / statistics.median(one), total / statistics.median(queued), total / statistics.median(scattered),
        min(issued),
    )  # fmt: skip


def measure_ring(copier: Copier, into: torch.Tensor, size_bytes: int) -> tuple[float, int]:
    """Blocks from pageable memory by reader threads into pinned slabs, copies behind them; and how many threads."""
    block = min(_RING_BYTES, size_bytes)
    source = torch.ones(size_bytes, dtype=torch.uint8)
    readers = max(1, min(4, read_cores().usable // 2))
    driver = copier.driver if isinstance(copier, CudaCopier) else None
    space = PinnedArena(3 * readers * block, driver)
    space.pin()

    def fetch(number: int, slab: Slab) -> None:
        slab.tensor.copy_(source[number * block : (number + 1) * block])

    ring = Ring(fetch, space.slabs(block), copier, readers)
    count = size_bytes // block

    def run() -> None:
        for number in range(count):
            ring.send_for(number, urgent=True)
        while (landed := ring.landed(wait=True)) is not None:
            copier.copy(landed.slab.tensor.data_ptr(), into.data_ptr() + landed.number * block, block)
            ring.give_back(landed.slab, copier.copied())
        copier.drain()

    try:
        seconds = [seconds_of(run) for _ in range(3)]
        return count * block / statistics.median(seconds), readers
    finally:
        ring.close()
        space.close()


def measure_pageable(into: torch.Tensor, size_bytes: int, rounds: int) -> float:
    source, target = torch.ones(size_bytes, dtype=torch.uint8), into[:size_bytes]

    def run() -> None:
        target.copy_(source)
        _synchronize(into.device)

    return size_bytes / statistics.median(seconds_of(run) for _ in range(rounds))


def measure_writes(copier: Copier, device: torch.device, count: int = 512) -> float:
    words = torch.zeros(count, dtype=torch.int64, device=device)
    copier.drain()

    def run() -> None:
        for index in range(count):
            copier.write(words.data_ptr() + 8 * index, index)

    seconds = []
    for _ in range(3):
        seconds.append(seconds_of(run))
        copier.drain()
    assert words.tolist() == list(range(count)), "the copy stream did not write what it was given"
    return min(seconds) / count


def measure_ids(device: torch.device, count: int = 200) -> float:
    ids = torch.arange(IDS, device=device)
    host = torch.empty(IDS, dtype=ids.dtype, pin_memory=device.type == "cuda")

    def run() -> None:
        host.copy_(ids, non_blocking=True)
        _synchronize(device)

    return statistics.median(seconds_of(run) for _ in range(count))


def _timed(copier: Copier, run: Callable[[], object]) -> float:
    """Seconds from the first operation's begin to the last one's end; by the GPU's clock where there is one."""
    if not isinstance(copier, CudaCopier):
        return seconds_of(run)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(copier.stream)
    run()
    end.record(copier.stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
