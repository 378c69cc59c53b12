"""One program that waits where hundreds would: until a row's blocks are all here, the device has room for others."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from steerpipe.kernels.dense_configs import overlapped
from steerpipe.kernels.experts_blocks import block_address


@triton.jit
def _hold(experts, table, seen, K: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()  # and lets nothing start before it ends: that is what it is for
    for rank in range(K):
        expert = tl.load(experts + rank)
        if expert >= 0:
            tl.store(seen + rank, block_address(table, expert, NATIVE))


def hold(experts: Tensor, table: Tensor, *, seen: Tensor) -> None:
    """What is queued next starts when every expert of a row is in the table: experts [k] int32, -1 is nobody.

    table [E] int64. seen [k] int64 receives the addresses.
    """
    assert seen.shape == experts.shape, f"{list(seen.shape)} addresses for {list(experts.shape)} experts"
    overlap = overlapped(table)
    _hold[(1,)](
        experts, table, seen, K=len(experts), NATIVE=table.is_cuda, OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
