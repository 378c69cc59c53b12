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
def _progress(at, now, PROGRAMS: tl.constexpr):
    """The least that any program of `fetch` says in this step; 0 if one of them has not begun."""
    words = tl.atomic_add(
        at.to(tl.pointer_type(tl.int64)) + tl.arange(0, PROGRAMS), tl.zeros((PROGRAMS,), tl.int64), sem="acquire"
    )
    told = tl.where(words >> 32 == now, words & 0xFFFFFFFF, 0)
    return tl.min(told & 0x7FFFFFFF, 0), tl.min(told >> 31, 0)


@triton.jit
def fetched_bytes(since, stamp, pair, ROUND: tl.constexpr, PROGRAMS: tl.constexpr, NATIVE: tl.constexpr):
    """How much of a pair's block is in its slot already: all rounds that every program of `fetch` has ended.

    Where all of them have begun, their last chunks are awaited: they are on their way, and would be read twice.
    """
    count = tl.full((), 0, tl.int64)
    if since is not None:
        at = tl.load(since + pair)
        if at != 0:
            now = tl.load(stamp)
            rounds, ended = _progress(at, now, PROGRAMS)
            if NATIVE:
                while (rounds > 0) & (ended == 0):  # they run, and stop: the router has looked
                    rounds, ended = _progress(at, now, PROGRAMS)
            count = rounds * ROUND
    return count


@triton.jit
def nearer(address, place, here, start, size, ELEMENT: tl.constexpr, since):
    """Where a part of a block is read that ends `size` bytes behind `start`, and whether it has to be kept."""
    kept = place != 0
    if since is not None:
        come = start + size <= here
        address = tl.where(come, place, address)
        kept = kept & (come == 0)
    return tl.multiple_of((address + start).to(tl.pointer_type(ELEMENT)), 16), kept


@triton.jit
def keep_weights(
    tile, scales, kept, keep_scales, weight, scale, rows, keep, start,
    K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Where it is to be kept, stores what was loaded at the same places of another block.

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
                tl.store(spots, scales, mask & keep_scales)
            else:
                tl.store(spots, scales, keep_scales)
        else:
            sums = start // SUB + tl.arange(0, BLOCK // SUB)
            spots = scale + rows[:, None] * (K // GROUP) + (sums * SUB // (GROUP // 2))[None, :]
            tl.store(spots, scales.to(tl.float16), keep[:, None] & (sums * SUB < WIDTH)[None, :] & keep_scales)


@triton.jit
def spread(scales, SUMS: tl.constexpr, EACH: tl.constexpr, WHOLE: tl.constexpr):
    """Scales as stored [N, G] → one per sum [N, SUMS], float32; EACH sums share one."""
    if WHOLE:
        N: tl.constexpr = scales.shape[0]
        G: tl.constexpr = scales.shape[1]
        return tl.reshape(tl.broadcast_to(scales.to(tl.float32)[:, :, None], (N, G, EACH)), (N, SUMS))
    else:
        return scales
