"""How soon every expert is used again, read off one row's residual at a tap and told to the host (predict/reuse.py).

`recall` makes what a tap looks at, a product follows (kernels/linear.py), and `tell` posts the scores. Legend: H
hidden, r rank, n experts of all layers.
"""

import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-6  # of the mean square, as predict.reuse has it
_TILE = 32  # scores of a program


@triton.jit
def _recall(
    x, context, inputs, positions, turn, kept,
    EPS: tl.constexpr, FIRST: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    now = value * tl.rsqrt(tl.sum(value * value, 0) / H + EPS)
    before = tl.load(context + at, mask=inside, other=0.0)
    mean = before + (1.0 - kept) * (now - before)
    real = tl.load(positions) >= 0
    tl.store(context + at, mean, mask=inside & real)
    if FIRST:
        tl.store(turn, tl.load(turn) + real.to(tl.int64))
    past = mean * tl.rsqrt(tl.sum(mean * mean, 0) / H + EPS)
    dtype = inputs.dtype.element_ty
    tl.store(inputs + at, now.to(dtype), mask=inside)
    tl.store(inputs + H + at, past.to(dtype), mask=inside)


@triton.jit
def _tell(
    hidden, expand, bias, positions, turn, words, n,
    R: tl.constexpr, R_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    unit = tl.arange(0, R_PAD)
    inside = place < n
    seen = tl.load(hidden + unit, mask=unit < R, other=0.0)
    seen = seen / (1.0 + tl.exp(-seen))
    rows = tl.load(expand + place[:, None] * R + unit[None, :], mask=inside[:, None] & (unit < R)[None, :], other=0.0)
    score = tl.sum(rows.to(tl.float32) * seen[None, :], 1) + tl.load(bias + place, mask=inside, other=0.0)
    bits = score.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    real = tl.load(positions) >= 0
    tl.store(words + place, (tl.load(turn) << 32) | bits, mask=inside & real, cache_modifier=".wt")


def recall(
    x: Tensor, *, context: Tensor, inputs: Tensor, positions: Tensor, turn: Tensor, kept: float, first: bool
) -> None:
    """x [1, H] → inputs [1, 2H]: x with a mean square of 1, and so its running mean, of which a token leaves `kept`.

    context [H] fp32 is that mean; turn [1] int64 counts tokens, at the `first` tap of each. A row at position -1
    leaves both alone.
    """
    hidden = x.shape[1]
    assert x.shape == (1, hidden) and inputs.shape == (1, 2 * hidden), "recall takes one row"
    block = triton.next_power_of_2(hidden)
    _recall[(1,)](x, context, inputs, positions, turn, kept, EPS=EPS, FIRST=first, H=hidden, BLOCK=block, num_warps=8)


def tell(hidden: Tensor, expand: Tensor, bias: Tensor, *, positions: Tensor, turn: Tensor, words: Tensor) -> None:
    """SiLU(hidden [1, r] fp32) times expand [n, r], plus bias [n] fp32 → words [n] int64 in pinned memory.

    A word is turn << 32 | the bits of the fp32 score: each is whole, so no order among them is needed. A row at
    position -1 writes none.
    """
    count, rank = expand.shape
    assert expand.is_contiguous() and words.shape == (count,), f"{len(words)} words for {count} scores"
    _tell[(triton.cdiv(count, _TILE),)](
        hidden, expand, bias, positions, turn, words, count, R=rank, R_PAD=triton.next_power_of_2(rank), TILE=_TILE
    )
