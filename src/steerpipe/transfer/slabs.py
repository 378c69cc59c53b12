"""Page-aligned memory that blocks are read into, before they are decoded into their slots."""

import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slab:
    """Memory for one block. `view` and `tensor` (uint8) are the same bytes; pages count as used once written."""

    view: memoryview
    tensor: Tensor

    @classmethod
    def allocate(cls, size_bytes: int) -> "Slab":
        pages = mmap.mmap(-1, size_bytes)  # starts on a page, which direct reads need
        return cls(memoryview(pages), torch.frombuffer(pages, dtype=torch.uint8))


@dataclass(slots=True)
class SlabPool:
    """Slabs of one size, the last one given back first. The caller holds a lock.

    It grows as needed, which is not much: what has begun is moved on before anything else of its reason begins, so
    each reader has at most one visit under way for each of the three reasons.
    """

    block_bytes: int
    allocated: int = 0
    _free: list[Slab] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return self.allocated * self.block_bytes

    @property
    def idle(self) -> bool:
        """Whether every slab has been given back."""
        return len(self._free) == self.allocated

    def take(self) -> Slab:
        if self._free:
            return self._free.pop()
        self.allocated += 1
        return Slab.allocate(self.block_bytes)

    def give_back(self, slab: Slab) -> None:
        self._free.append(slab)
