"""Attention of a prompt's rows, 16 at a time, over KV blocks.

R rows, D head dim, B blocks. A program takes the 16 rows of a cell and some of the query heads that share a KV head,
and goes through the keys block by block from position 0 (or the window's first block). A row's bits depend on its own
position alone. Scores, softmax and sums are fp32; probabilities are rounded to the model's dtype before they meet the
values, which for bf16 moves a result by about 2^-9 of itself.
"""

import triton
import triton.language as tl
from torch import Tensor

from steerpipe.core.geometry import CELL_ROWS, KV_BLOCK_TOKENS
from steerpipe.kernels.dense_configs import PREFILL_ATTENTION, AttentionTile


@triton.jit
def _prefill(
    queries, positions, blocks, out, base, layer_bytes, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    WINDOW: tl.constexpr, CELL: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV
    CHUNKS: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    cell = tl.program_id(0)
    kv = tl.program_id(1) // CHUNKS
    line = tl.arange(0, CELL * SHARE)  # SHARE heads of row 0, then of row 1, ...
    row = cell * CELL + line // SHARE
    member = tl.program_id(1) % CHUNKS * SHARE + line % SHARE
    at = base + row
    position = tl.load(positions + row)
    last = tl.max(position, 0).to(tl.int32)  # what lies beyond has not been stored
    real = (position >= 0) & (member < GROUP)
    column = tl.arange(0, D_PAD)
    place = (row.to(tl.int64) * HEADS + kv * GROUP + member)[:, None] * D + column[None, :]
    wide = (column < D)[None, :]
    q = tl.load(queries + place, mask=real[:, None] & wide, other=0.0)
    highest = tl.full([CELL * SHARE], -1e30, tl.float32)  # finite: a row's first blocks may all be hidden
    weight = tl.zeros([CELL * SHARE], tl.float32)
    value = tl.zeros([CELL * SHARE, D_PAD], tl.float32)
    dtype = queries.dtype.element_ty
    first = 0
    if WINDOW > 0:
        first = tl.maximum(base + cell * CELL - WINDOW + 1, 0) // BLOCK * BLOCK
    for start in range(first, last + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        block = tl.load(blocks + start // BLOCK) + layer_bytes
        block = tl.multiple_of(block.to(tl.pointer_type(dtype)), 16)
        inside = (key <= last)[:, None] & wide
        entry = kv * BLOCK * D + (key % BLOCK)[:, None] * D + column[None, :]
        k = tl.load(block + entry, mask=inside, other=0.0)  # [KEYS, D_PAD]
        v = tl.load(block + KV * BLOCK * D + entry, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = key[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > at[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shrink = tl.exp(highest - higher)
        share = tl.exp(score - higher[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        value = value * shrink[:, None] + tl.dot(share.to(dtype), v, input_precision="ieee")
        highest = higher
    mixed = tl.where(real[:, None], value / tl.where(real, weight, 1.0)[:, None], 0.0)
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=(member < GROUP)[:, None] & wide)


def prefill_attention(
    queries: Tensor,
    positions: Tensor,
    blocks: Tensor,
    *,
    base: int,
    kv_heads: int,
    layer_bytes: int,
    window: int | None = None,
    out: Tensor,
    tile: AttentionTile = PREFILL_ATTENTION,
) -> None:
    """queries: [R, heads, D], blocks: [1, B] int64 addresses → out [R, heads · D]. R is a multiple of 16.

    Row r stands at position base + r, and base is a multiple of 16. positions: [R] int64 says the same, or -1 in
    padding, whose output is zeros; keys beyond a cell's last real row are never read.
    """
    rows, heads, head_dim = queries.shape
    assert rows % CELL_ROWS == 0 and base % CELL_ROWS == 0, "prompts are computed in whole cells"
    assert queries.is_contiguous() and out.is_contiguous(), "rows lie one after the other"
    group, pad = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    narrow = queries.element_size() == 2
    share = min(4, triton.next_power_of_2(group)) if narrow else 1
    keys = 64 if narrow and pad <= 128 else 32
    _prefill[(rows // CELL_ROWS, kv_heads * triton.cdiv(group, share))](
        queries, positions, blocks, out, base, layer_bytes, head_dim**-0.5,
        HEADS=heads, KV=kv_heads, D=head_dim, D_PAD=pad, WINDOW=window or 0,
        CELL=CELL_ROWS, BLOCK=KV_BLOCK_TOKENS, SHARE=share, KEYS=keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
