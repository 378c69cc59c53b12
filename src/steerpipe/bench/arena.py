"""All experts of a shape in page-locked memory, made up by repeating a few blocks; how long that took, part by part."""

import math
import time

import torch

from steerpipe.bench.results import Pinning
from steerpipe.bench.shapes import Shape
from steerpipe.bench.weights import draw_block
from steerpipe.core.ids import ExpertId
from steerpipe.core.machine import read_cores
from steerpipe.transfer.cuda.backing import ReadCounts
from steerpipe.transfer.cuda.driver import Driver
from steerpipe.transfer.cuda.pinned import PinnedArena

DISTINCT = 8  # blocks that are drawn


class SyntheticBacking:
    """A Backing of every block of a shape. Sources come and go over it; whoever made it frees it."""

    ring = None

    def __init__(self, shape: Shape, driver: Driver | None, seed: int = 0) -> None:
        """Fills and pins; without a driver (tests on a CPU) it is memory like any other."""
        self._stride, self._count = shape.layout.block_bytes, shape.all_experts
        random = torch.Generator().manual_seed(seed)
        made = torch.empty(min(DISTINCT, self._count), self._stride, dtype=torch.uint8)
        for block in made:
            draw_block(shape.layout, block, random)
        self._arena = PinnedArena(shape.expert_bytes, driver)
        begin = time.perf_counter()
        self._arena.repeat(list(made), self._stride, self._count, threads=min(16, read_cores().usable))
        filled = time.perf_counter()
        self._arena.pin()
        self._seen = self._arena.device_address
        self.pinning = Pinning(shape.expert_bytes, filled - begin, time.perf_counter() - filled)

    @property
    def pinned_bytes(self) -> int:
        return self._arena.size_bytes

    def reads(self) -> ReadCounts:
        """Nothing lies below."""
        return ReadCounts()

    def held(self) -> frozenset[ExpertId]:
        return frozenset()

    def locate(self, number: int) -> int:
        return self._arena.address + number * self._stride

    def view(self, number: int) -> int:
        return self._seen + number * self._stride if self._seen else 0

    @property
    def addresses(self) -> list[int]:
        """Of all blocks, scattered: a walk with a large stride that meets every block once."""
        count = self._count
        step = next(step for step in range(count * 5 // 8 + 1, 3 * count) if math.gcd(step, count) == 1)
        return [self.locate(index * step % count) for index in range(count)]

    def close(self) -> None:
        """A source that ends leaves the blocks to the next one."""

    def free(self) -> None:
        """Unpins. No source may be left."""
        self._arena.close()
