"""Memory that the GPU copies from by itself: pages of this process, registered with the driver.

Not torch's pin_memory: that takes 1 s/GiB and rounds up to a power of two (60 GiB took 98). Anonymous pages that
threads have touched are registered in 0.35 s/GiB, and take what they take.
"""

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError, SteerpipeError
from steerpipe.core.machine import read_memory
from steerpipe.core.units import format_bytes
from steerpipe.transfer.cuda.driver import Driver
from steerpipe.transfer.slabs import Slab

TOUCH_BYTES = 64 << 20  # of one call of a thread


class PinnedArena:
    """One stretch of pages. Fill it or `touch` it with threads, then `pin` it: pages that are there are pinned faster.

    Without a driver (tests on a CPU) it is memory like any other. `close` it, or collect it: it is unpinned then, and
    freed when nobody has a view of it any more. Raises CapacityError if the machine has not so much memory free.
    """

    def __init__(self, size_bytes: int, driver: Driver | None = None) -> None:
        assert size_bytes > 0, f"an arena of {size_bytes} bytes"
        pages = _allocate(size_bytes)
        self.size_bytes = size_bytes
        self.view = memoryview(pages)
        self.tensor: Tensor = torch.frombuffer(pages, dtype=torch.uint8)  # [size_bytes], the same bytes
        self.address = self.tensor.data_ptr()
        self._driver = driver
        self._unpin: weakref.finalize[..., PinnedArena] | None = None

    @property
    def device_address(self) -> int:
        """Where kernels see it, once it is pinned; 0: they cannot. Without a driver kernels run on the CPU."""
        return self.address if self._driver is None else self._driver.device_view(self.address)

    @property
    def pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def pin(self) -> None:
        """Takes 0.35 s/GiB. Once."""
        assert self._unpin is None, "an arena is pinned once"
        if self._driver is not None:
            self._driver.register(self.address, self.size_bytes)
        # The tensor keeps the pages until they are unpinned:
        self._unpin = weakref.finalize(self, _unpin, self._driver, self.tensor)

    def touch(self, threads: int) -> None:
        """Writes zeros to every page."""
        starts = range(0, self.size_bytes, TOUCH_BYTES)

        def clear(start: int) -> None:
            ctypes.memset(self.address + start, 0, min(TOUCH_BYTES, self.size_bytes - start))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(clear, starts))

    def repeat(self, blocks: Sequence[Tensor], stride: int, count: int, threads: int) -> None:
        """Fills `count` places at equal distances with `blocks` (uint8, contiguous) over and over: for benchmarks."""
        assert count * stride <= self.size_bytes, f"{count} blocks of {stride} bytes in {self.size_bytes}"
        assert all(block.is_contiguous() and block.nbytes <= stride for block in blocks), (
            "a block is no stretch of bytes"
        )

        def fill(first: int) -> None:
            for position in range(first, count, threads):
                block = blocks[position % len(blocks)]
                ctypes.memmove(self.address + position * stride, block.data_ptr(), block.nbytes)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, range(threads)))

    def slabs(self, size_bytes: int) -> list[Slab]:
        """The arena, cut into places for one block each."""
        return [self.slab(start, size_bytes) for start in range(0, self.size_bytes - size_bytes + 1, size_bytes)]

    def slab(self, start: int, size_bytes: int) -> Slab:
        end = start + size_bytes
        return Slab(self.view[start:end], self.tensor[start:end])

    def close(self) -> None:
        """Unpins. No copy may be under way. Twice is once."""
        if self._unpin is not None:
            self._unpin()


def _unpin(driver: Driver | None, tensor: Tensor) -> None:
    if driver is not None:
        with suppress(SteerpipeError):  # the driver may be gone already: the interpreter ends, or the GPU has failed
            driver.activate()
            driver.unregister(tensor.data_ptr())


def _allocate(size_bytes: int) -> mmap.mmap:
    free = read_memory().available_bytes
    try:
        if size_bytes > free:  # asking for it would work, and touching it would end the process
            raise MemoryError
        pages = mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError, MemoryError):
        raise CapacityError(
            f"{format_bytes(size_bytes)} of pinned memory are more than is free ({format_bytes(free)})",
            fix="give a smaller --ram, or free memory",
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # fewer pages to pin; not every kernel has them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
