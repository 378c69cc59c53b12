"""The fast tier's memory: one allocation, cut into slots of one size, each large enough for any expert of the model.

Where keys and values share it, slots lie in pages (`core.pages`), whose ends may be wasted.

Legend: H hidden, I expert width.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError
from steerpipe.core.pages import PageShape
from steerpipe.core.protocols import ExpertWeights
from steerpipe.core.units import format_bytes
from steerpipe.store.layout import BlockLayout
from steerpipe.store.resident import ALIGNMENT_BYTES

Shape = tuple[int, int]  # H, I


def slot_bytes(layouts: Collection[BlockLayout], dtype: torch.dtype) -> int:
    """What the largest expert takes in compute-ready form, both matrices on cache lines."""
    return max(sum(_matrix_bytes((layout.hidden, layout.width), dtype)) for layout in layouts)


class SlotArena:
    """`slots` places for compute-ready experts. All memory is taken, and touched, on creation: none is added later.

    Knows nothing of who lies where (`residency` does) and guards nothing: whoever holds a slot may write it.
    Raises CapacityError if the memory cannot be had.
    """

    def __init__(
        self, layouts: Collection[BlockLayout], slots: int, dtype: torch.dtype, device: torch.device,
        shape: PageShape | None = None,
    ) -> None:  # fmt: skip
        """`shape` of the pages that the slots lie in, all of them whole; None: one after the other."""
        self.slots = slots
        self.dtype = dtype
        self.slot_bytes = slot_bytes(layouts, dtype)
        self._page_slots, self._page_bytes = (1, self.slot_bytes) if shape is None else (shape.slots, shape.page_bytes)
        assert slots % self._page_slots == 0, f"{slots} slots are no whole pages of {self._page_slots}"
        memory = self._memory = allocate(self.total_bytes, device)
        assert memory.data_ptr() % ALIGNMENT_BYTES == 0, "torch's allocator gave memory that is not aligned"
        memory.zero_()  # touched: the operating system cannot refuse it in the middle of an answer
        shapes = {(layout.hidden, layout.width) for layout in layouts}
        self._views = {shape: self._cut(memory, shape, dtype) for shape in shapes}

    @property
    def total_bytes(self) -> int:
        return self.slots // self._page_slots * self._page_bytes

    def page(self, page: int) -> Tensor:
        """A page's memory, uint8."""
        return self._memory[page * self._page_bytes : (page + 1) * self._page_bytes]

    def copy(self, before: int, after: int) -> None:
        """The bytes of one slot into another."""
        start, end = self._start(before), self._start(after)
        self._memory[end : end + self.slot_bytes] = self._memory[start : start + self.slot_bytes]

    def weights(self, slot: int, layout: BlockLayout) -> ExpertWeights:
        """The slot's memory as an expert of that layout: views made once, the same at every call."""
        return self._views[layout.hidden, layout.width][slot]

    def _cut(self, memory: Tensor, shape: Shape, dtype: torch.dtype) -> list[ExpertWeights]:
        hidden, width = shape
        gate_up_bytes, _ = _matrix_bytes(shape, dtype)
        views = []
        for start in map(self._start, range(self.slots)):
            gate_up = _matrix(memory, start, (2 * width, hidden), dtype)  # [2I, H]
            down = _matrix(memory, start + gate_up_bytes, (hidden, width), dtype)  # [H, I]
            views.append(ExpertWeights(gate_up, down))
        return views

    def _start(self, slot: int) -> int:
        page, place = divmod(slot, self._page_slots)
        return page * self._page_bytes + place * self.slot_bytes


def _matrix_bytes(shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    """Of gate_up and of down, rounded up to whole cache lines."""
    hidden, width = shape
    down = -(-hidden * width * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    gate_up = -(-2 * hidden * width * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return gate_up, down


def _matrix(memory: Tensor, start: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    rows, columns = shape
    return memory[start : start + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


def allocate(size_bytes: int, device: torch.device) -> Tensor:
    """Memory for slots, uint8, as it comes; CapacityError if it cannot be had."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as problem:  # torch.OutOfMemoryError on a GPU, "can't allocate memory" on a CPU
        if "memory" not in str(problem):
            raise
        raise CapacityError(
            f"{format_bytes(size_bytes)} of expert slots on {device} are more than is free",
            fix="give a smaller --fast-memory, or free memory",
        ) from None
