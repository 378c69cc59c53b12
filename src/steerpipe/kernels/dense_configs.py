"""Launch configurations of the dense kernels, measured by benchmarks/dense_kernels.py on one H200.

Figures: benchmarks/notes/2026-11-15-cuda-kernels.md.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# A kernel may start while the one before it ends (programmatic dependent launch): it asks for weights at once and waits
# before it touches anything that another kernel reads or writes. Every kernel that is launched so waits, so the order
# of the stream holds for all of them.
OVERLAP = True  # a layer without its experts: 28.9 us instead of 30.3; single products up to 30 % less


def overlapped(x: Tensor) -> bool:
    """Whether a kernel on this tensor's device is launched so. The interpreter cannot."""
    return OVERLAP and x.is_cuda and can_overlap()


@cache
def can_overlap() -> bool:
    """Hopper and later have the instruction. Without a card, when kernels are compiled ahead, that is for Hopper."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@dataclass(frozen=True, slots=True)
class RowTile:
    """A program of a one-row product: so many weight rows, so many columns at a time, by so many warps."""

    rows: int
    columns: int  # a power of two
    warps: int
    hold: bool = True  # all loads of the first columns are in flight before the first is used


# (outputs, inputs, bytes of a weight) → what was fastest there
MEASURED: dict[tuple[int, int, int], RowTile] = {
    (5120, 2048, 2): RowTile(8, 1024, 4),  # 5.8 us, cuBLAS 8.2
    (2048, 4096, 2): RowTile(4, 4096, 4),  # 5.1 us, cuBLAS 8.9
    (128, 2048, 4): RowTile(2, 2048, 4),  # 1.3 us
    (151_936, 2048, 2): RowTile(2, 2048, 1),  # 136 us, cuBLAS 143
    (11_264, 2048, 2): RowTile(2, 2048, 1),  # gate and up of a shared expert: 11.8 us, cuBLAS 13.1
    (2048, 5632, 2): RowTile(4, 2048, 4),  # 6.0 us, cuBLAS 10.7
}


def row_tile(outputs: int, inputs: int, itemsize: int) -> RowTile:
    """The measured configuration, or a tile of about 16 KiB and enough programs for the whole chip."""
    measured = MEASURED.get((outputs, inputs, itemsize))
    if measured is not None:
        return measured
    columns = min(8192 if itemsize == 2 else 4096, max(16, 1 << (inputs - 1).bit_length()))
    if outputs <= 512:  # few outputs: one program each, so that many multiprocessors take part
        return RowTile(1, columns, 4)
    return RowTile(min(16, max(1, 16384 // (columns * itemsize))), columns, 2)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    warps: int
    stages: int  # tiles of keys in flight


DECODE_ATTENTION = AttentionTile(warps=4, stages=2)  # 32 heads on 4: 29 us at 32k keys, whatever the tile
DECODE_ATTENTION_ALONE = AttentionTile(warps=2, stages=2)  # a KV head per head, 16: 87 us at 32k keys, 4 warps 97
PREFILL_ATTENTION = AttentionTile(warps=4, stages=2)
