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
def _told(progress, now, chunk, inside, PROGRAMS: tl.constexpr):
    """Of four parts: 1 << number if all chunks of it are here, 16 << number if one is on its way. chunk [4, SPAN]."""
    words = progress.to(tl.pointer_type(tl.int64)) + chunk % PROGRAMS
    word = tl.atomic_add(words, tl.zeros_like(chunk), mask=inside, sem="acquire")
    told = tl.where(inside & (word >> 32 == now), word & 0xFFFFFFFF, 1 << 31)  # ended << 31 | rounds
    wanted = chunk // PROGRAMS
    here = tl.min(tl.where(inside, ((told & 0x7FFFFFFF) > wanted).to(tl.int64), 1), 1)  # [4]
    coming = tl.max(((told == wanted) & (told > 0)).to(tl.int64), 1)
    return tl.sum((here | (coming << 4)) << tl.arange(0, 4), 0)


@triton.jit
def parts_here(
    since, stamp, pair, first, second, scales, more_scales,
    WEIGHTS: tl.constexpr, SCALES: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, PROGRAMS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Which of four parts of a pair's block are in its slot already: WEIGHTS bytes at each of two offsets, and SCALES.

    Bits 0 to 3. A part is there if every chunk that it lies in has come; SPAN is the most that there are. A chunk that
    is on its way is awaited, or it would be read twice; but whoever has brought nothing of the block may never begin.
    """
    found = tl.full((), 0, tl.int64)
    if since is not None:
        progress = tl.load(since + pair)
        if progress != 0:
            now = tl.load(stamp)
            number = tl.arange(0, 4)
            start = tl.where(number == 0, first, tl.where(number == 1, second, scales))
            start = tl.where(number == 3, more_scales, start).to(tl.int64)[:, None]  # [4, 1]
            size = tl.where(number < 2, WEIGHTS, SCALES)[:, None]
            chunk = start // CHUNK + tl.arange(0, SPAN)[None, :]  # [4, SPAN]
            inside = (size > 0) & (chunk * CHUNK < start + size)
            found = _told(progress, now, chunk, inside, PROGRAMS)
            if NATIVE:
                while found >= 16:  # they stop: the router has looked
                    found = _told(progress, now, chunk, inside, PROGRAMS)
    return found


@triton.jit
def nearer(address, place, here, number: tl.constexpr, start, ELEMENT: tl.constexpr, since):
    """Where part `number` of `here` is read, its tensor at `start` of the block, and whether it has to be kept."""
    kept = place != 0
    if since is not None:
        come = here & (1 << number) != 0
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
