"""From a row's qkv to its queries, and its key and value to the KV cache. R rows, D head dim, B blocks."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.core.geometry import KV_BLOCK_TOKENS
from steerpipe.kernels.dense_configs import overlapped


@triton.jit
def _mean_square(line, COUNT: tl.constexpr):
    """Of COUNT values from `line` on."""
    BLOCK: tl.constexpr = triton.next_power_of_2(COUNT)
    at = tl.arange(0, BLOCK)
    value = tl.load(line + at, mask=at < COUNT, other=0.0).to(tl.float32)
    return tl.sum(value * value, 0) / COUNT


@triton.jit
def _normed(value, gain, scale):
    """Rounded before and after the weight, as weight * (wide * scale).to(dtype) is."""
    rounded = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
    return (gain.to(tl.float32) * rounded).to(value.dtype)


@triton.jit
def _rotate_and_store(
    qkv, turn, positions, blocks, queries, query_norm, key_norm, block_stride, layer_bytes, eps, clip,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ALL_HEADS: tl.constexpr, CLIP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # queries, then keys, then values
    HALF: tl.constexpr = D // 2
    at = tl.arange(0, PAD)
    inside = at < HALF
    position = tl.load(positions + row)
    line = qkv + row * (HEADS + 2 * KV) * D
    first = tl.load(line + head * D + at, mask=inside, other=0.0)
    second = tl.load(line + head * D + HALF + at, mask=inside, other=0.0)
    if NORM:  # noqa: SIM102 (settled when it is compiled)
        if head < HEADS + KV:
            weight = query_norm
            if head >= HEADS:
                weight = key_norm
            if ALL_HEADS:
                if head >= HEADS:
                    square = _mean_square(line + HEADS * D, KV * D)
                    weight += (head - HEADS) * D
                else:
                    square = _mean_square(line, HEADS * D)
                    weight += head * D
            else:
                wide, more = first.to(tl.float32), second.to(tl.float32)
                square = tl.sum(wide * wide + more * more, 0) / D
            scale = tl.rsqrt(square + eps)
            first = _normed(first, tl.load(weight + at, mask=inside, other=0.0), scale)
            second = _normed(second, tl.load(weight + HALF + at, mask=inside, other=0.0), scale)
    one, two = first.to(tl.float32), second.to(tl.float32)
    if CLIP:
        one = tl.minimum(tl.maximum(one, -clip), clip).to(first.dtype).to(tl.float32)
        two = tl.minimum(tl.maximum(two, -clip), clip).to(first.dtype).to(tl.float32)
    if head < HEADS + KV:
        cos = tl.load(turn + row * D + at, mask=inside, other=0.0)
        sin = tl.load(turn + row * D + HALF + at, mask=inside, other=0.0)
        turned = one * cos - two * sin
        two = two * cos + one * sin
        one = turned
    dtype = queries.dtype.element_ty
    if head < HEADS:
        target = queries + (row * HEADS + head) * D
        one = tl.where(position >= 0, one, 0.0)
        two = tl.where(position >= 0, two, 0.0)
        tl.store(target + at, one.to(dtype), mask=inside)
        tl.store(target + HALF + at, two.to(dtype), mask=inside)
    elif position >= 0:
        address = tl.load(blocks + row * block_stride + position // BLOCK) + layer_bytes
        target = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        place = (head - HEADS) * BLOCK * D + (position % BLOCK) * D  # [2, KV, BLOCK, D]
        tl.store(target + place + at, one.to(dtype), mask=inside)
        tl.store(target + place + HALF + at, two.to(dtype), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    turn: Tensor,
    positions: Tensor,
    blocks: Tensor,
    *,
    heads: int,
    kv_heads: int,
    layer_bytes: int,
    queries: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    clip: float | None = None,
) -> None:
    """Normalises, clips and rotates; writes queries, and keys and values into the KV block of each row.

    qkv: [R, (heads + 2 kv_heads) D]; turn: [R, 2, D / 2] fp32; positions: [R] int64; blocks: [R or 1, B] int64
    addresses. A row's key and value go to blocks[row, position // 128] + layer_bytes, laid out [2, kv_heads, 128, D]
    in the dtype of qkv. At position -1 nothing is stored and the queries are zeros. queries: [R, heads, D] out. Norms
    are [D] for each head by itself, or [heads · D] and [kv_heads · D] for all at once; both or neither.
    """
    rows, (_, _, half) = len(qkv), turn.shape
    head_dim = queries.shape[-1]
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim and 2 * half == head_dim, "whole heads are rotated"
    assert qkv.is_contiguous() and turn.is_contiguous() and queries.is_contiguous(), "rows lie one after the other"
    assert (query_norm is None) == (key_norm is None), "queries and keys are normalised together"
    all_heads = query_norm is not None and len(query_norm) != head_dim
    overlap = overlapped(qkv)
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        qkv, turn, positions, blocks, queries, query_norm, key_norm,
        blocks.stride(0) if len(blocks) > 1 else 0, layer_bytes, eps, clip if clip is not None else 0.0,
        HEADS=heads, KV=kv_heads, D=head_dim, PAD=triton.next_power_of_2(half), BLOCK=KV_BLOCK_TOKENS,
        NORM=query_norm is not None, ALL_HEADS=all_heads, CLIP=clip is not None, OVERLAP=overlap,
        num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
