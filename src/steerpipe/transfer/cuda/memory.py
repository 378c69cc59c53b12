"""The device's memory for experts: slots of raw blocks, a block of zeros, and the table of addresses.

Legend: L layers with experts, E experts of the largest of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from steerpipe.store.layout import PAGE_BYTES, PART_ALIGNMENT_BYTES
from steerpipe.store.slots import allocate
from steerpipe.transfer.cuda.backing import LayerBlocks

ENTRY_BYTES = 8


def slot_bytes(layers: Mapping[int, LayerBlocks]) -> int:
    """One slot holds the largest block as it lies in the pack."""
    return -(-max(each.block_bytes for each in layers.values()) // PAGE_BYTES) * PAGE_BYTES


class BlockMemory:
    """All of it is taken on creation, none is added later. Knows addresses, not who lies where."""

    def __init__(self, layers: Mapping[int, LayerBlocks], slots: int, device: torch.device) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes(layers)
        self._blocks = allocate((slots + 1) * self.slot_bytes, device)  # uint8; the last one stays zero
        self._blocks[slots * self.slot_bytes :].zero_()
        largest = max(each.experts for each in layers.values())
        self.table = torch.zeros((len(layers), largest), dtype=torch.int64, device=device)  # [L, E]
        self._rows = {layer: self.table[row, : each.experts] for row, (layer, each) in enumerate(layers.items())}
        begin, first = self._blocks.data_ptr(), self.table.data_ptr()
        assert begin % PART_ALIGNMENT_BYTES == 0, "torch's allocator gave memory that is not aligned"
        self.addresses = [begin + slot * self.slot_bytes for slot in range(slots)]
        self.zeros = begin + slots * self.slot_bytes
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
