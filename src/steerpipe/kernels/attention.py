"""Attention of decode rows over KV blocks: splits of the keys, then a merge in ascending order.

R rows, D head dim, B blocks, S splits. A split's size follows from the row's position alone (64 keys each, more from
8,192 positions on), so that neither neighbours nor the size of the grid change a bit. Scores, softmax and sums are
fp32. Queries that share a KV head go through the tensor cores together (probabilities are then rounded to the model's
dtype before they meet the values); a head of its own, and fp32, are multiplied and summed in fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.core.geometry import KV_BLOCK_TOKENS
from steerpipe.kernels.dense_configs import DECODE_ATTENTION, DECODE_ATTENTION_ALONE, AttentionTile, overlapped

MOST_SPLITS = 128
SPLIT_TILE = 64  # keys that are read at a time; divides a KV block
MERGED = 16  # splits that are merged at a time


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """What splits hand to the merge: highest score, sum of weights, weighted values. All fp32."""

    top: Tensor  # [R, heads, S]
    mass: Tensor  # [R, heads, S]
    total: Tensor  # [R, heads, S, D]


def splits_for(keys: int) -> int:
    """Splits that cover every row of up to `keys` keys."""
    return min(triton.cdiv(keys, SPLIT_TILE), MOST_SPLITS)


def scratch_for(rows: int, heads: int, head_dim: int, splits: int, device: torch.device) -> AttentionScratch:
    """Room for decode_attention of up to so many rows and splits; may be used by one call after the other."""
    top = torch.empty(rows, heads, splits, device=device)
    total = torch.empty(rows, heads, splits, head_dim, device=device)
    return AttentionScratch(top, torch.empty_like(top), total)


@triton.jit
def _span(position, TILE: tl.constexpr, MOST: tl.constexpr, WINDOW: tl.constexpr):
    """Keys of a split, and the first key that the row sees."""
    size = tl.cdiv(position // TILE + 1, MOST) * TILE
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return size, first


@triton.jit
def _decode_parts(
    queries, positions, blocks, top, mass, total, block_stride, layer_bytes, splits, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
    DOT: tl.constexpr, QUERIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    size, first = _span(position, TILE, MOST, WINDOW)
    begin = tl.maximum(split * size, first // TILE * TILE)
    end = tl.minimum(split * size + size, position + 1)
    if begin < end:
        GROUP: tl.constexpr = HEADS // KV
        column = tl.arange(0, D_PAD)
        key = tl.arange(0, TILE)
        dtype = queries.dtype.element_ty
        query = tl.arange(0, QUERIES)
        real = query < GROUP
        if DOT:  # a program takes the queries of one KV head
            kv = tl.program_id(1)
            head = kv * GROUP + query
            line = queries + (row * HEADS + head)[:, None] * D + column[None, :]
            q = tl.load(line, mask=real[:, None] & (column < D)[None, :], other=0.0)
            highest = tl.full([QUERIES], float("-inf"), tl.float32)
            weight = tl.zeros([QUERIES], tl.float32)
            value = tl.zeros([QUERIES, D_PAD], tl.float32)
        else:  # a program takes one query
            head = tl.program_id(1)
            kv = head // GROUP
            line = queries + (row * HEADS + head) * D + column
            q = tl.load(line, mask=column < D, other=0.0).to(tl.float32)
            highest = float("-inf")
            weight = 0.0
            value = tl.zeros([D_PAD], tl.float32)
        for start in range(begin, end, TILE):
            base = tl.load(blocks + row * block_stride + start // BLOCK) + layer_bytes
            base = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16)
            seen = (start + key <= position) & (start + key >= first)
            mask = seen[:, None] & (column < D)[None, :]
            place = kv * BLOCK * D + (start % BLOCK + key)[:, None] * D + column[None, :]
            k = tl.load(base + place, mask=mask, other=0.0)  # [TILE, D_PAD]
            v = tl.load(base + KV * BLOCK * D + place, mask=mask, other=0.0)  # stale values are never read
            if DOT:
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [QUERIES, TILE]
                score = tl.where(seen[None, :], score, float("-inf"))
                higher = tl.maximum(highest, tl.max(score, 1))
                shrink = tl.exp(highest - higher)
                share = tl.exp(score - higher[:, None])
                weight = weight * shrink + tl.sum(share, 1)
                value = value * shrink[:, None] + tl.dot(share.to(dtype), v, input_precision="ieee")
            else:
                score = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale  # [TILE]
                score = tl.where(seen, score, float("-inf"))
                higher = tl.maximum(highest, tl.max(score, 0))
                shrink = tl.exp(highest - higher)
                share = tl.exp(score - higher)
                weight = weight * shrink + tl.sum(share, 0)
                value = value * shrink + tl.sum(share[:, None] * v.to(tl.float32), 0)
            highest = higher
        part = (row * HEADS + head) * splits + split
        if DOT:
            tl.store(top + part, highest, mask=real)
            tl.store(mass + part, weight, mask=real)
            tl.store(total + part[:, None] * D + column[None, :], value, mask=real[:, None] & (column < D)[None, :])
        else:
            tl.store(top + part, highest)
            tl.store(mass + part, weight)
            tl.store(total + part * D + column, value, mask=column < D)


@triton.jit
def _decode_merge(
    positions, top, mass, total, out, splits,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, MOST: tl.constexpr, MERGED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    place = row * HEADS + tl.program_id(0)
    position = tl.load(positions + row).to(tl.int32)
    size, first = _span(position, TILE, MOST, WINDOW)
    count = tl.where(position >= 0, position // size + 1, 0)
    split = tl.arange(0, MOST)
    filled = (split >= first // size) & (split < count)
    score = tl.load(top + place * splits + split, mask=filled, other=float("-inf"))
    highest = tl.maximum(tl.max(score, 0), -1e30)  # finite also where there is nothing
    share = tl.where(filled, tl.exp(score - highest), 0.0)
    whole = tl.sum(share * tl.load(mass + place * splits + split, mask=filled, other=0.0), 0)
    column = tl.arange(0, D_PAD)
    value = tl.zeros([MERGED, D_PAD], tl.float32)
    for start in range(first // size // MERGED * MERGED, count, MERGED):
        some = start + tl.arange(0, MERGED)
        inside = (some >= first // size) & (some < count)
        mask = inside[:, None] & (column < D)[None, :]
        near = tl.load(top + place * splits + some, mask=inside, other=float("-inf"))
        scale = tl.where(inside, tl.exp(near - highest), 0.0)
        value += scale[:, None] * tl.load(total + (place * splits + some)[:, None] * D + column[None, :], mask, 0.0)
    mixed = tl.sum(value, 0) / tl.where(position >= 0, whole, 1.0)
    tl.store(out + place * D + column, mixed.to(out.dtype.element_ty), mask=column < D)


def decode_attention(
    queries: Tensor,
    positions: Tensor,
    blocks: Tensor,
    *,
    kv_heads: int,
    layer_bytes: int,
    window: int | None = None,
    splits: int,
    scratch: AttentionScratch,
    out: Tensor,
    tile: AttentionTile | None = None,
) -> None:
    """queries: [R, heads, D], positions: [R] int64, blocks: [R, B] int64 addresses → out [R, heads · D].

    A row sees the keys up to its position, and window - 1 before it where there is a window; at position -1 its output
    is zeros. `splits` is at least `splits_for` of every row's keys. KV blocks are laid out [2, kv_heads, 128, D] from
    layer_bytes on and aligned to 16 bytes. Two launches: a merge by the last split to arrive would save one.
    """
    rows, heads, head_dim = queries.shape
    assert queries.is_contiguous() and out.is_contiguous(), "rows lie one after the other"
    assert splits <= MOST_SPLITS and splits <= scratch.top.shape[2] and rows <= len(scratch.top), "too little scratch"
    assert scratch.total.shape[1::2] == (heads, head_dim), "this scratch is for other heads"
    group, pad = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    dot = group > 1 and queries.element_size() == 2
    tile = tile or (DECODE_ATTENTION if dot else DECODE_ATTENTION_ALONE)
    stride, overlap = scratch.top.shape[2], overlapped(queries)
    _decode_parts[(splits, kv_heads if dot else heads, rows)](
        queries, positions, blocks, scratch.top, scratch.mass, scratch.total,
        blocks.stride(0) if len(blocks) > 1 else 0, layer_bytes, stride, head_dim**-0.5,
        HEADS=heads, KV=kv_heads, D=head_dim, D_PAD=pad, WINDOW=window or 0,
        BLOCK=KV_BLOCK_TOKENS, TILE=SPLIT_TILE, MOST=MOST_SPLITS, DOT=dot,
        QUERIES=max(16, triton.next_power_of_2(group)), OVERLAP=overlap,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
    )  # fmt: skip
    _decode_merge[(heads, rows)](
        positions, scratch.top, scratch.mass, scratch.total, out, stride,
        HEADS=heads, D=head_dim, D_PAD=pad, WINDOW=window or 0,
        TILE=SPLIT_TILE, MOST=MOST_SPLITS, MERGED=MERGED, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
