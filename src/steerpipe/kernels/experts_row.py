"""One row through its experts: matrix times vector, bound by the bytes of the weights.

A program computes some rows of one matrix for one pair: gate and up together, or down. It keeps partial sums in
registers and adds them up once at the end. Weights of the first step are asked for before anything waits.
SUB is 0 but for int4, where it is the number of bytes (of one group) that are summed before the scale comes.
With `origin` and `target` (one address per pair, else None) a block is read where the router found it, perhaps in
pinned memory, and what was loaded is stored to the target on the way. Nothing is loaded twice: the link is slow.
With `since` (else None) parts of a block may be in its target already, and are read there (fetch.py).
Legend: H hidden, I width, K inputs of the matrix at hand (H or I), N rows of a program, B bytes or numbers of a step,
G groups of a step.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.kernels.experts_blocks import (
    block_address,
    count_missing,
    int4_halves,
    int8_values,
    pair_of,
    read_address,
)
from steerpipe.kernels.experts_keep import keep_weights, nearer, parts_here, scale_spots, spread
from steerpipe.kernels.fetch import give_way


@triton.jit
def _load_inputs(x, start, K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr):
    """x of a step, zero outside: [B], 0, 0, or for int4 low halves · 256 [B], high · 16 [B], correction [B / SUB]."""
    places = start + tl.arange(0, BLOCK)
    if SUB == 0:
        return tl.load(x + places, places < K, other=0.0).to(tl.float32), 0.0, 0.0
    else:
        HALF: tl.constexpr = GROUP // 2
        columns = places // HALF * GROUP + places % HALF
        low = tl.load(x + columns, places < K // 2, other=0.0).to(tl.float32)
        high = tl.load(x + columns + HALF, places < K // 2, other=0.0).to(tl.float32)
        correction = tl.sum(tl.reshape(264.0 * low + 24.0 * high, (BLOCK // SUB, SUB)), 1)
        return 256.0 * low, 16.0 * high, correction


@triton.jit
def _load_weights(
    weight, scale, rows, keep, start,
    K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr,
    MASKED: tl.constexpr, CACHE: tl.constexpr, EVICT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Numbers or bytes of a step [N, B], and for int4 its scales [N, B / SUB], or if WHOLE as stored [N, G].

    Zero outside.
    """
    places = start + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = K if SUB == 0 else K // 2  # numbers or bytes of a row
    spots = weight + rows[:, None] * WIDTH + places[None, :]
    if MASKED:
        mask = keep[:, None] & (places < WIDTH)[None, :]
        tile = tl.load(spots, mask, other=0, cache_modifier=CACHE, eviction_policy=EVICT)
    else:
        tile = tl.load(spots, cache_modifier=CACHE, eviction_policy=EVICT)
    if SUB == 0:
        return tile, 0.0
    elif WHOLE:
        spots, mask = scale_spots(scale, rows, keep, start, K, BLOCK, GROUP)
        if MASKED:
            return tile, tl.load(spots, mask, other=0.0)
        else:
            return tile, tl.load(spots)
    else:
        sums = start // SUB + tl.arange(0, BLOCK // SUB)
        spots = scale + rows[:, None] * (K // GROUP) + (sums * SUB // (GROUP // 2))[None, :]
        if MASKED:
            return tile, tl.load(spots, keep[:, None] & (sums * SUB < WIDTH)[None, :], other=0.0).to(tl.float32)
        else:
            return tile, tl.load(spots).to(tl.float32)


@triton.jit
def _factors(
    tile, scales, low, high, correction, SUB: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """One step as two factors: weights [N, B] and x [1, B], or for int4 sums and scales, both [N, B / SUB]."""
    if SUB == 0:
        return int8_values(tile, NATIVE) if tile.dtype == tl.int8 else tile.to(tl.float32), low[None, :]
    else:
        N: tl.constexpr = tile.shape[0]
        S: tl.constexpr = tile.shape[1] // SUB
        first, second = int4_halves(tile, NATIVE)
        sums = tl.sum(tl.reshape(first * low[None, :], (N, S, SUB)), 2)
        sums += tl.sum(tl.reshape(second * high[None, :], (N, S, SUB)), 2)
        return sums - correction[None, :], spread(scales, S, GROUP // 2 // SUB, WHOLE)


@triton.jit
def _multiply(
    tile, scales, low, high, correction, SUB: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The first step: products [N, B], or for int4 scaled sums [N, B / SUB]."""
    left, right = _factors(tile, scales, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    return left * right


@triton.jit
def _add(
    totals, tile, scales, low, high, correction, SUB: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """A later step, fused by name: left to choose, a compiler rounds one product or the other, by how it unrolls."""
    left, right = _factors(tile, scales, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    return tl.fma(left, tl.broadcast_to(right, left.shape), totals)


@triton.jit
def gate_up_row_kernel(
    x, experts, table, act, origin, target, since, stamp, running,
    H: tl.constexpr, I: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    CACHE: tl.constexpr, EVICT: tl.constexpr, OVERLAP: tl.constexpr, FOLLOWED: tl.constexpr, NATIVE: tl.constexpr,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, MISSING_FIRST: tl.constexpr,
):  # fmt: skip
    """act[pair] = silu(gate x) · (up x), for ROWS of it."""
    if OVERLAP:
        gdc_wait()
    pair, missing = tl.program_id(1), 0
    if origin is not None:
        missing = count_missing(origin, PAIRS)
        if MISSING_FIRST:
            pair = pair_of(pair, origin, missing, PAIRS)
    if FOLLOWED:  # after the wait: the down kernel may read experts at once
        if EARLY:  # noqa: SIM114 (one is known when this is compiled, the other is not)
            gdc_launch_dependents()
        elif missing == 0:
            gdc_launch_dependents()
    expert = tl.load(experts + pair)
    if expert < 0:
        return
    low, high, correction = 0.0, 0.0, 0.0
    if EARLY:
        low, high, correction = _load_inputs(x, 0, H, BLOCK, SUB, GROUP)
    if origin is None:
        address = block_address(table, expert, NATIVE)
        place = address
    else:
        if running is not None and NATIVE:
            give_way(running, tl.load(origin + pair) < 0)
        address = read_address(origin, table, expert, pair, NATIVE)
        place = tl.load(target + pair)
    BYTES: tl.constexpr = (H if SUB == 0 else H // 2) * ELEMENT.primitive_bitwidth // 8  # of a row
    SCALES: tl.constexpr = 2 * H // GROUP if GROUP != 0 else 0
    at = tl.program_id(0) * ROWS
    here = parts_here(
        since, stamp, pair, START + at * BYTES, START + (I + at) * BYTES, SCALE + at * SCALES,
        SCALE + (I + at) * SCALES, ROWS * BYTES, ROWS * SCALES, CHUNK, SPAN, PROGRAMS, NATIVE,
    )  # fmt: skip
    own = tl.multiple_of((place + START).to(tl.pointer_type(ELEMENT)), 16)
    own_scale = tl.multiple_of((place + SCALE).to(tl.pointer_type(tl.float16)), 16)
    gate_at, keep_gate = nearer(address, place, here, 0, START, ELEMENT, since)
    up_at, keep_up = nearer(address, place, here, 1, START, ELEMENT, since)
    gate_scale_at, keep_gate_scale = nearer(address, place, here, 2, SCALE, tl.float16, since)
    up_scale_at, keep_up_scale = nearer(address, place, here, 3, SCALE, tl.float16, since)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = rows < I
    gate, gate_scale = _load_weights(
        gate_at, gate_scale_at, rows, keep, 0, H, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE
    )
    up, up_scale = _load_weights(
        up_at, up_scale_at, rows + I, keep, 0, H, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE
    )
    if not EARLY:  # its first step is asked for, mostly its only one: the link must not pause between the kernels
        if FOLLOWED:
            gdc_launch_dependents()
        low, high, correction = _load_inputs(x, 0, H, BLOCK, SUB, GROUP)
    if origin is not None:
        keep_weights(
            gate, gate_scale, keep_gate, keep_gate_scale, own, own_scale, rows, keep, 0, H, BLOCK, SUB, GROUP, MASKED,
            WHOLE,
        )  # fmt: skip
        keep_weights(
            up, up_scale, keep_up, keep_up_scale, own, own_scale, rows + I, keep, 0, H, BLOCK, SUB, GROUP, MASKED, WHOLE
        )
    gates = _multiply(gate, gate_scale, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    ups = _multiply(up, up_scale, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    for start in tl.range(BLOCK, H if SUB == 0 else H // 2, BLOCK, loop_unroll_factor=4):
        low, high, correction = _load_inputs(x, start, H, BLOCK, SUB, GROUP)
        gate, gate_scale = _load_weights(
            gate_at, gate_scale_at, rows, keep, start, H, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE
        )
        up, up_scale = _load_weights(
            up_at, up_scale_at, rows + I, keep, start, H, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE
        )
        if origin is not None:
            keep_weights(
                gate, gate_scale, keep_gate, keep_gate_scale, own, own_scale, rows, keep, start, H, BLOCK, SUB, GROUP,
                MASKED, WHOLE,
            )  # fmt: skip
            keep_weights(
                up, up_scale, keep_up, keep_up_scale, own, own_scale, rows + I, keep, start, H, BLOCK, SUB, GROUP,
                MASKED, WHOLE,
            )  # fmt: skip
        gates = _add(gates, gate, gate_scale, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
        ups = _add(ups, up, up_scale, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    gate_sum, up_sum = tl.sum(gates, 1), tl.sum(ups, 1)
    if ELEMENT == tl.int8:
        gate_scales = tl.load(gate_scale_at + rows, keep, other=0.0)
        up_scales = tl.load(up_scale_at + I + rows, keep, other=0.0)
        if origin is not None:
            tl.store(own_scale + rows, gate_scales, keep & keep_gate_scale)
            tl.store(own_scale + I + rows, up_scales, keep & keep_up_scale)
        gate_sum *= gate_scales.to(tl.float32)
        up_sum *= up_scales.to(tl.float32)
    value = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(act + pair * I + rows, value.to(act.dtype.element_ty), keep)


@triton.jit
def down_row_kernel(
    act, experts, table, part, origin, target, since, stamp,
    H: tl.constexpr, I: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    CACHE: tl.constexpr, EVICT: tl.constexpr, OVERLAP: tl.constexpr, NATIVE: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, SPAN: tl.constexpr, PROGRAMS: tl.constexpr, PAIRS: tl.constexpr, MISSING_FIRST: tl.constexpr,
):  # fmt: skip
    """part[pair] = down act[pair], for ROWS of it."""
    pair = tl.program_id(1)
    if origin is not None and MISSING_FIRST:
        pair = pair_of(pair, origin, count_missing(origin, PAIRS), PAIRS)
    expert = tl.load(experts + pair)
    if expert < 0:
        return
    if origin is None:
        address = block_address(table, expert, NATIVE)
        place = address
    else:
        address = read_address(origin, table, expert, pair, NATIVE)
        place = tl.load(target + pair)
    BYTES: tl.constexpr = (I if SUB == 0 else I // 2) * ELEMENT.primitive_bitwidth // 8  # of a row
    SCALES: tl.constexpr = 2 * I // GROUP if GROUP != 0 else 0
    at = tl.program_id(0) * ROWS
    here = parts_here(
        since, stamp, pair, START + at * BYTES, START + at * BYTES, SCALE + at * SCALES, SCALE + at * SCALES,
        ROWS * BYTES, ROWS * SCALES, CHUNK, SPAN, PROGRAMS, NATIVE,
    )  # fmt: skip
    own = tl.multiple_of((place + START).to(tl.pointer_type(ELEMENT)), 16)
    own_scale = tl.multiple_of((place + SCALE).to(tl.pointer_type(tl.float16)), 16)
    weight, kept = nearer(address, place, here, 0, START, ELEMENT, since)
    scale, keep_scale = nearer(address, place, here, 2, SCALE, tl.float16, since)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = rows < H
    tile, scales = _load_weights(weight, scale, rows, keep, 0, I, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE)
    if origin is not None:
        keep_weights(tile, scales, kept, keep_scale, own, own_scale, rows, keep, 0, I, BLOCK, SUB, GROUP, MASKED, WHOLE)
    if OVERLAP:
        gdc_wait()  # act is written from here on
    x = act + pair * I
    low, high, correction = _load_inputs(x, 0, I, BLOCK, SUB, GROUP)
    totals = _multiply(tile, scales, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    for start in tl.range(BLOCK, I if SUB == 0 else I // 2, BLOCK, loop_unroll_factor=4):
        low, high, correction = _load_inputs(x, start, I, BLOCK, SUB, GROUP)
        tile, scales = _load_weights(
            weight, scale, rows, keep, start, I, BLOCK, SUB, GROUP, MASKED, CACHE, EVICT, WHOLE
        )
        if origin is not None:
            keep_weights(
                tile, scales, kept, keep_scale, own, own_scale, rows, keep, start, I, BLOCK, SUB, GROUP, MASKED, WHOLE
            )
        totals = _add(totals, tile, scales, low, high, correction, SUB, GROUP, WHOLE, NATIVE)
    total = tl.sum(totals, 1)
    if ELEMENT == tl.int8:
        row_scales = tl.load(scale + rows, keep, other=0.0)
        if origin is not None:
            tl.store(own_scale + rows, row_scales, keep & keep_scale)
        total *= row_scales.to(tl.float32)
    tl.store(part + pair * H + rows, total, keep)
