"""The device's memory for experts: slots of raw blocks, a block of zeros, and the table of addresses.

Legend: L layers with experts, E experts of the largest of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from steerpipe.core.pages import PageShape
from steerpipe.store.layout import PAGE_BYTES, PART_ALIGNMENT_BYTES
from steerpipe.store.slots import allocate
from steerpipe.transfer.cuda.backing import LayerBlocks

ENTRY_BYTES = 8


def slot_bytes(layers: Mapping[int, LayerBlocks]) -> int:
    """One slot holds the largest block as it lies in the pack."""
    return -(-max(each.block_bytes for each in layers.values()) // PAGE_BYTES) * PAGE_BYTES


class BlockMemory:
    """All of it is taken on creation, none is added later. Knows addresses, not who lies where."""

    def __init__(
        self, layers: Mapping[int, LayerBlocks], slots: int, device: torch.device, shape: PageShape | None = None
    ) -> None:  # fmt: skip
        """`shape` of the pages that the slots lie in, all of them whole; None: one after the other."""
        self.slots = slots
        self.slot_bytes = slot_bytes(layers)
        self._page_slots, self._page_bytes = (1, self.slot_bytes) if shape is None else (shape.slots, shape.page_bytes)
        assert self._page_bytes % PART_ALIGNMENT_BYTES == 0, f"pages of {self._page_bytes} bytes are not aligned"
        end = slots // self._page_slots * self._page_bytes
        self._blocks = allocate(end + self.slot_bytes, device)  # uint8; the last slot stays zero
        self._blocks[end:].zero_()
        largest = max(each.experts for each in layers.values())
        self.table = torch.zeros((len(layers), largest), dtype=torch.int64, device=device)  # [L, E]
        self._rows = {layer: self.table[row, : each.experts] for row, (layer, each) in enumerate(layers.items())}
        begin, first = self._blocks.data_ptr(), self.table.data_ptr()
        assert begin % PART_ALIGNMENT_BYTES == 0, "torch's allocator gave memory that is not aligned"
        self.addresses = [begin + self._start(slot) for slot in range(slots)]
        self.zeros = begin + end
        self.entries = [
            first + ENTRY_BYTES * (row * largest + index)
            for row, each in enumerate(layers.values())
            for index in range(each.experts)
        ]  # by the experts' numbers
        self.absent = [0] * len(self.entries)  # by the experts' numbers: what an entry says of one that is not here

    @property
    def total_bytes(self) -> int:
        return self._blocks.numel() + self.table.nbytes

    def row(self, layer: int) -> Tensor:
        """[E of that layer]; a view, always the same."""
        return self._rows[layer]

    def page(self, page: int) -> Tensor:
        """A page's memory, uint8."""
        return self._blocks[page * self._page_bytes : (page + 1) * self._page_bytes]

    def move(self, before: int, after: int) -> None:
        """The bytes of one slot into another, on the current stream."""
        start, end = self._start(before), self._start(after)
        self._blocks[end : end + self.slot_bytes] = self._blocks[start : start + self.slot_bytes]

    def _start(self, slot: int) -> int:
        page, place = divmod(slot, self._page_slots)
        return page * self._page_bytes + place * self.slot_bytes
