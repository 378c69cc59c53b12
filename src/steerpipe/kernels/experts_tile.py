"""Tiles of 16 rows through one expert each: batched decode and prefill.

A program multiplies some rows of one matrix with the inputs of one tile; every pair is a column of the product of its
own, so that its bits do not depend on its neighbours. Quantised weights are exact in float32 and are rounded to the
model's dtype for the product; an int8 code is exact there as it is, and its row's scale comes after the sum.
Legend: H hidden, I width, K inputs of the matrix at hand (H or I), N rows of a program, B bytes or numbers of a step.
"""

import triton
import triton.language as tl

from steerpipe.kernels.experts_blocks import block_address, int4_halves, int8_values

TILE_ROWS = tl.constexpr(16)


@triton.jit
def _load_inputs(spots, used, start, K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr):
    """Inputs of a step, [B, 16], zero outside: (x, x), or for int4 those of the low and of the high halves."""
    places = start + tl.arange(0, BLOCK)
    if SUB == 0:
        x = tl.load(spots + places[:, None], (places < K)[:, None] & used, other=0.0)
        return x, x
    else:
        HALF: tl.constexpr = GROUP // 2
        mask = (places < K // 2)[:, None] & used
        columns = (places // HALF * GROUP + places % HALF)[:, None]
        return tl.load(spots + columns, mask, other=0.0), tl.load(spots + columns + HALF, mask, other=0.0)


@triton.jit
def _load_scales(
    scale, rows, keep, start, K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr
):
    """int4 scales of a step [N, B / SUB], zero outside. Asked for a step ahead: too narrow for asynchronous copies."""
    if SUB == 0:
        return 0.0
    else:
        sums = start // SUB + tl.arange(0, BLOCK // SUB)
        within = keep[:, None] & (sums * SUB < K // 2)[None, :]
        return tl.load(scale + rows[:, None] * (K // GROUP) + (sums * SUB // (GROUP // 2))[None, :], within, other=0.0)


@triton.jit
def _load_weights(
    weight, scales, rows, keep, start,
    K: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, EVICT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Weights of a step, [N, B], zero outside: (w, w), or for int4 (low half, high half); int8 without its scale."""
    places = start + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = K if SUB == 0 else K // 2
    spots = weight + rows[:, None] * WIDTH + places[None, :]
    tile = tl.load(spots, keep[:, None] & (places < WIDTH)[None, :], other=0, eviction_policy=EVICT)
    if SUB == 0:
        values = int8_values(tile, NATIVE) if tile.dtype == tl.int8 else tile
        return values, values
    else:
        N: tl.constexpr = tile.shape[0]
        S: tl.constexpr = BLOCK // SUB
        wide = tl.reshape(tl.broadcast_to(scales.to(tl.float32)[:, :, None], (N, S, SUB)), (N, BLOCK))
        low, high = int4_halves(tile, NATIVE)
        return low * (256.0 * wide) - 264.0 * wide, high * (16.0 * wide) - 24.0 * wide  # exact


@triton.jit
def _accumulate(total, weights, x, NATIVE: tl.constexpr):
    """total [N, 16] + weights [N, B] x [B, 16], in x's dtype with float32 sums."""
    weights = weights.to(x.dtype)
    if NATIVE:
        return tl.dot(weights, x, total, input_precision="ieee")
    else:  # the interpreter is wrong for bfloat16
        return total + tl.dot(weights.to(tl.float32), x.to(tl.float32), input_precision="ieee")


@triton.jit
def gate_up_tile_kernel(
    x, tile_expert, tile_pairs, table, act, TOP_K: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVICT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """act[pair] = silu(gate x) · (up x), for ROWS of it and the pairs of a tile."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert < 0:
        return
    pairs = tl.load(tile_pairs + tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS))[None, :]  # [1, 16]
    used = pairs >= 0
    address = block_address(table, expert, NATIVE)
    weight = tl.multiple_of((address + START).to(tl.pointer_type(ELEMENT)), 16)
    scale = tl.multiple_of((address + SCALE).to(tl.pointer_type(tl.float16)), 16)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < I
    spots = x + (pairs // TOP_K).to(tl.int64) * H
    gate = tl.zeros((ROWS, TILE_ROWS), tl.float32)
    up = tl.zeros((ROWS, TILE_ROWS), tl.float32)
    gate_scales = _load_scales(scale, rows, keep, 0, H, BLOCK, SUB, GROUP)
    up_scales = _load_scales(scale, rows + I, keep, 0, H, BLOCK, SUB, GROUP)
    for start in range(0, H if SUB == 0 else H // 2, BLOCK):
        low_x, high_x = _load_inputs(spots, used, start, H, BLOCK, SUB, GROUP)
        low_gate, high_gate = _load_weights(weight, gate_scales, rows, keep, start, H, BLOCK, SUB, EVICT, NATIVE)
        low_up, high_up = _load_weights(weight, up_scales, rows + I, keep, start, H, BLOCK, SUB, EVICT, NATIVE)
        if SUB != 0:
            gate_scales = _load_scales(scale, rows, keep, start + BLOCK, H, BLOCK, SUB, GROUP)
            up_scales = _load_scales(scale, rows + I, keep, start + BLOCK, H, BLOCK, SUB, GROUP)
        gate = _accumulate(gate, low_gate, low_x, NATIVE)
        up = _accumulate(up, low_up, low_x, NATIVE)
        if SUB != 0:
            gate = _accumulate(gate, high_gate, high_x, NATIVE)
            up = _accumulate(up, high_up, high_x, NATIVE)
    if ELEMENT == tl.int8:
        gate *= tl.load(scale + rows, keep, other=0.0).to(tl.float32)[:, None]
        up *= tl.load(scale + I + rows, keep, other=0.0).to(tl.float32)[:, None]
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(act + pairs.to(tl.int64) * I + rows[:, None], value.to(act.dtype.element_ty), keep[:, None] & used)


@triton.jit
def down_tile_kernel(
    act, tile_expert, tile_pairs, table, part,
    H: tl.constexpr, I: tl.constexpr, START: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVICT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """part[pair] = down act[pair], for ROWS of it and the pairs of a tile."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert < 0:
        return
    pairs = tl.load(tile_pairs + tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS))[None, :].to(tl.int64)
    used = pairs >= 0
    address = block_address(table, expert, NATIVE)
    weight = tl.multiple_of((address + START).to(tl.pointer_type(ELEMENT)), 16)
    scale = tl.multiple_of((address + SCALE).to(tl.pointer_type(tl.float16)), 16)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < H
    spots = act + pairs * I
    total = tl.zeros((ROWS, TILE_ROWS), tl.float32)
    scales = _load_scales(scale, rows, keep, 0, I, BLOCK, SUB, GROUP)
    for start in range(0, I if SUB == 0 else I // 2, BLOCK):
        low_x, high_x = _load_inputs(spots, used, start, I, BLOCK, SUB, GROUP)
        low, high = _load_weights(weight, scales, rows, keep, start, I, BLOCK, SUB, EVICT, NATIVE)
        if SUB != 0:
            scales = _load_scales(scale, rows, keep, start + BLOCK, I, BLOCK, SUB, GROUP)
        total = _accumulate(total, low, low_x, NATIVE)
        if SUB != 0:
            total = _accumulate(total, high, high_x, NATIVE)
    if ELEMENT == tl.int8:
        total *= tl.load(scale + rows, keep, other=0.0).to(tl.float32)[:, None]
    tl.store(part + pairs * H + rows[:, None], total, keep[:, None] & used)
