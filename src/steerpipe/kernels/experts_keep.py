"""Weights that are read from pinned memory, and kept on the way: what the row kernels do besides computing.

Scales of int4 are loaded as they are stored, each once and 16 bytes at a time, where a step has whole groups (WHOLE).
Legend: K inputs of the matrix at hand, N rows of a program, B bytes or numbers of a step, G groups of a step.
"""

import triton
import triton.language as tl


@triton.jit
def scale_spots(scale, rows, keep, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Where the scales of an int4 step of whole groups stand [N, G], and which of them there are."""
    HALF: tl.constexpr = GROUP // 2
    groups = start // HALF + tl.arange(0, BLOCK // HALF)
    return scale + rows[:, None] * (K // GROUP) + groups[None, :], keep[:, None] & (groups < K // GROUP)[None, :]


@triton.jit
def keep_weights(
    tile, scales, kept, weight, scale, rows, keep, start,
    K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """If `kept`, stores what was loaded at the same places of another block.

    Masked, not branched around: a branch would cut the step in two, and its registers would not reach.
    """
    places = start + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = K if SUB == 0 else K // 2
    spots = weight + rows[:, None] * WIDTH + places[None, :]
    if MASKED:
        tl.store(spots, tile, keep[:, None] & (places < WIDTH)[None, :] & kept)
    else:
        tl.store(spots, tile, kept)
    if SUB != 0:
        if WHOLE:
            spots, mask = scale_spots(scale, rows, keep, start, K, BLOCK, GROUP)
            if MASKED:
                tl.store(spots, scales, mask & kept)
            else:
                tl.store(spots, scales, kept)
        else:
            sums = start // SUB + tl.arange(0, BLOCK // SUB)
            spots = scale + rows[:, None] * (K // GROUP) + (sums * SUB // (GROUP // 2))[None, :]
            tl.store(spots, scales.to(tl.float16), keep[:, None] & (sums * SUB < WIDTH)[None, :] & kept)


@triton.jit
def spread(scales, SUMS: tl.constexpr, EACH: tl.constexpr, WHOLE: tl.constexpr):
    """Scales as stored [N, G] → one per sum [N, SUMS], float32; EACH sums share one."""
    if WHOLE:
        N: tl.constexpr = scales.shape[0]
        G: tl.constexpr = scales.shape[1]
        return tl.reshape(tl.broadcast_to(scales.to(tl.float32)[:, :, None], (N, G, EACH)), (N, SUMS))
    else:
        return scales
