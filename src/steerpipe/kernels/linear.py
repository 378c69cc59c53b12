"""Dense products of one row, bound by the rate at which weights come from memory. K inputs, N outputs, I width.

A program takes a few outputs and all of K, in chunks of BK columns. It adds products in a [rows, BK] tile of fp32 and
sums the tile once at the end, so loads of 16 bytes follow each other without a reduction between them, and the order
of additions depends on the launch configuration alone.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.kernels.dense_configs import RowTile, overlapped, row_tile


@triton.jit
def _scale(x, eps, K: tl.constexpr, BK: tl.constexpr):
    """1 / rms of the row."""
    squares = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        at = start + tl.arange(0, BK)
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _products(
    x, weight, norm, normed, rows, eps,
    K: tl.constexpr, BK: tl.constexpr, HOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Row of x times the given rows of weight: [len(rows)] fp32. Program 0 stores the normalised row."""
    if OVERLAP:
        gdc_launch_dependents()
    at = tl.arange(0, BK)
    lines = weight + rows[:, None] * K
    # the first chunk of weights is on its way while the kernel before this one ends and the row is normalised
    chunk = tl.load(lines + at[None, :], mask=at[None, :] < K, other=0.0, eviction_policy="evict_first")
    gain = chunk  # of no use without a norm
    if norm is not None:
        gain = tl.load(norm + at, mask=at < K, other=0.0)
    if OVERLAP:
        gdc_wait()  # x and the outputs belong to other kernels until here
    elif HOLD:
        tl.debug_barrier()  # no product before it: else the compiler saves registers and loads one after the other
    scale = 1.0
    if norm is not None:
        scale = _scale(x, eps, K, BK)
    total = tl.zeros([rows.shape[0], BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        columns = start + at
        inside = columns < K
        if start > 0:
            chunk = tl.load(lines + columns[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            if norm is not None:
                gain = tl.load(norm + columns, mask=inside, other=0.0)
        value = tl.load(x + columns, mask=inside, other=0.0)
        if norm is not None:  # rounded before and after the weight, as weight * (wide * scale).to(dtype) is
            rounded = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
            value = (gain.to(tl.float32) * rounded).to(value.dtype)
            if normed is not None:
                tl.store(normed + columns, value, mask=inside & (tl.program_id(0) == 0))
        total += chunk.to(tl.float32) * value.to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def _row_linear(
    x, weight, out, bias, norm, normed, residual, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, HOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = place < N
    rows = tl.minimum(place, N - 1).to(tl.int64)
    total = _products(x, weight, norm, normed, rows, eps, K, BK, HOLD, OVERLAP)
    if bias is not None:
        total += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if residual is not None:
        before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        total = before + total.to(dtype).to(tl.float32)
    tl.store(out + place, total.to(dtype), mask=inside)


@triton.jit
def _silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _row_gated_linear(
    x, gate_up, out, norm, eps, I,
    K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, HOLD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, 2 * ROWS)  # gate and up of an output lie beside each other
    place = tl.program_id(0) * ROWS + pair // 2
    rows = (tl.minimum(place, I - 1) + (pair % 2) * I).to(tl.int64)
    total = _products(x, gate_up, norm, None, rows, eps, K, BK, HOLD, OVERLAP)
    dtype = out.dtype.element_ty
    gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), [ROWS, 2]))
    value = _silu(gate).to(dtype).to(tl.float32) * up
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + place, value.to(dtype), mask=place < I)


@triton.jit
def _gated(gate_up, out, I, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    gate = tl.load(gate_up + row * 2 * I + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    value = _silu(gate).to(dtype).to(tl.float32) * up
    tl.store(out + row * I + at, value.to(dtype), mask=inside)


def row_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    normed: Tensor | None = None,
    residual: Tensor | None = None,
    tile: RowTile | None = None,
) -> None:
    """x: [1, K], weight: [N, K] → out [1, N], summed in fp32 and rounded once to out's dtype.

    norm: [K]; x is normalised first, and `normed` [1, K] receives it. bias: [N], added before the rounding. residual:
    [1, N], added after it; it may be `out` itself. Every weight is read once; `tile` is for benchmarks.
    """
    outputs, inputs = weight.shape
    assert x.shape == (1, inputs) and out.shape == (1, outputs), "row_linear takes one row"
    assert weight.is_contiguous() and x.is_contiguous() and out.is_contiguous(), "row_linear reads whole rows"
    assert normed is None or norm is not None, "there is no normalised row without a norm"
    assert x.data_ptr() != out.data_ptr(), "other programs still read x while one writes"
    assert residual is None or residual.dtype == out.dtype, "the residual is added in its own dtype"
    tile = tile or row_tile(outputs, inputs, weight.element_size())
    overlap = overlapped(x)
    _row_linear[(triton.cdiv(outputs, tile.rows),)](
        x, weight, out, bias, norm, normed, residual, outputs, eps,
        K=inputs, ROWS=tile.rows, BK=tile.columns, HOLD=tile.hold, OVERLAP=overlap,
        num_warps=tile.warps, launch_pdl=overlap,
    )  # fmt: skip


def row_gated_linear(
    x: Tensor,
    gate_up: Tensor,
    *,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    tile: RowTile | None = None,
) -> None:
    """x: [1, K], gate_up: [2I, K] (gate rows, then up rows) → silu(gate) · up: out [1, I].

    Rounded to out's dtype where `gated` of a rounded product is.
    """
    width, inputs = gate_up.shape[0] // 2, gate_up.shape[1]
    assert x.shape == (1, inputs) and out.shape == (1, width), "row_gated_linear takes one row"
    assert gate_up.is_contiguous() and x.is_contiguous() and out.is_contiguous(), "it reads whole rows"
    tile = tile or row_tile(2 * width, inputs, gate_up.element_size())
    rows = max(tile.rows // 2, 1)  # of the output; two of the weight each
    overlap = overlapped(x)
    _row_gated_linear[(triton.cdiv(width, rows),)](
        x, gate_up, out, norm, eps, width,
        K=inputs, ROWS=rows, BK=tile.columns, HOLD=tile.hold, OVERLAP=overlap,
        num_warps=tile.warps, launch_pdl=overlap,
    )  # fmt: skip


def gated(gate_up: Tensor, *, out: Tensor) -> None:
    """silu(gate) · up of several rows: gate_up [R, 2I] → out [R, I], both contiguous."""
    rows, width = out.shape
    assert gate_up.shape == (rows, 2 * width), "a gate and an up for every output"
    assert gate_up.is_contiguous() and out.is_contiguous(), "gated reads whole rows"
    block = min(1024, triton.next_power_of_2(width))
    overlap = overlapped(out)
    _gated[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, OVERLAP=overlap, launch_pdl=overlap)
