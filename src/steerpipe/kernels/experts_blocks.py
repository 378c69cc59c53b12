"""Parts that the expert kernels share: the address of an expert's block, and numbers out of packed bytes.

An int8 or int4 code becomes float32 without a conversion instruction (those run at a fraction of the rate): its bits
are put into the mantissa of a known number. NATIVE is off in Triton's interpreter, which runs no assembly and cannot
wait; what it computes instead has the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def block_address(table, expert, NATIVE: tl.constexpr):
    """Where the block of `expert` begins in the device's memory; waits until the table says so."""
    address = tl.load(table + expert, volatile=True)
    if NATIVE:
        while address <= 0:  # 0 or a place in pinned memory: it is not here
            address = tl.load(table + expert, volatile=True)
    return address


@triton.jit
def read_address(origin, table, expert, pair, NATIVE: tl.constexpr):
    """As `block_address`, but as the router found it: a place in pinned memory will do, only 0 has to wait."""
    address = tl.load(origin + pair) & 0x7FFFFFFFFFFFFFFF
    if NATIVE:
        while address <= 0:
            address = tl.load(table + expert, volatile=True)
    return address


@triton.jit
def count_missing(origin, PAIRS: tl.constexpr):
    """How many of a row's blocks the router found in pinned memory."""
    found = 0
    for pair in tl.static_range(PAIRS):
        found += (tl.load(origin + pair) < 0).to(tl.int32)
    return found


@triton.jit
def pair_of(turn, origin, missing, PAIRS: tl.constexpr):
    """The pair whose turn it is, where the `missing` ones go before the others, each kind in its order."""
    found, before = 0, 0  # `before`: missing ones of lower number
    for pair in tl.static_range(PAIRS):
        own = (tl.load(origin + pair) < 0).to(tl.int32)
        place = tl.where(own != 0, before, missing + pair - before)
        found = tl.where(place == turn, pair, found)
        before += own
    return found


@triton.jit
def int8_values(codes, NATIVE: tl.constexpr):
    """int8 → the same numbers in float32: code + 128 goes into the mantissa of 2^23, then 2^23 + 128 is taken off."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7440;
            prmt.b32 $1, bytes, 0x4B000000, 0x7441;
            prmt.b32 $2, bytes, 0x4B000000, 0x7442;
            prmt.b32 $3, bytes, 0x4B000000, 0x7443;
            add.f32 $0, $0, 0fCB000080;
            add.f32 $1, $1, 0fCB000080;
            add.f32 $2, $2, 0fCB000080;
            add.f32 $3, $3, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r", [codes], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return codes.to(tl.float32)


@triton.jit
def int4_halves(packed, NATIVE: tl.constexpr):
    """uint8 → float32 1 + low/256 and 1 + high/16, where low and high are 0 to 15.

    One shift and two logic operations for two weights. Who sums these over x corrects by multiples of
    the sum of x, which costs a float32 sum about six of its bits (1e-5; a bfloat16 activation is off by 4e-3).
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 part<4>;
            shl.b32 part0, $8, 15;
            shl.b32 part1, $8, 7;
            shr.u32 part2, $8, 1;
            shr.u32 part3, $8, 9;
            lop3.b32 $0, part0, 0x78000, 0x3F800000, 0xEA;
            lop3.b32 $1, part1, 0x78000, 0x3F800000, 0xEA;
            lop3.b32 $2, part2, 0x78000, 0x3F800000, 0xEA;
            lop3.b32 $3, part3, 0x78000, 0x3F800000, 0xEA;
            lop3.b32 $4, part0, 0x780000, 0x3F800000, 0xEA;
            lop3.b32 $5, part1, 0x780000, 0x3F800000, 0xEA;
            lop3.b32 $6, part2, 0x780000, 0x3F800000, 0xEA;
            lop3.b32 $7, part3, 0x780000, 0x3F800000, 0xEA;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r", [packed], dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        shifted = packed.to(tl.int32) << 15
        low = ((shifted & 0x78000) | 0x3F800000).to(tl.float32, bitcast=True)
        high = ((shifted & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)
        return low, high
