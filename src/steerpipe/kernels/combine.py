"""Adds what the experts gave, in ascending expert order. R rows, k experts per row, H hidden."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.kernels.dense_configs import overlapped


@triton.jit
def _combine(
    part, experts, gates, x, out, shared, switch,
    H: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    before = tl.load(x + row * H + at, mask=inside, other=0.0).to(tl.float32)
    rank = tl.arange(0, K_PAD)
    own = tl.load(experts + row * K + rank, mask=rank < K, other=2147483647)  # padding comes last
    gate = tl.load(gates + row * K + rank, mask=rank < K, other=0.0)
    earlier = (own[None, :] < own[:, None]) | ((own[None, :] == own[:, None]) & (rank[None, :] < rank[:, None]))
    place = tl.sum(earlier.to(tl.int32), 1)  # [K_PAD]: where each rank stands in ascending order
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(K):
        here = place == step
        pair = tl.sum(tl.where(here, rank, 0), 0)
        used = tl.sum(tl.where(here, own, 0), 0) >= 0  # -1: whatever `part` holds there must not matter
        weight = tl.sum(tl.where(here, gate, 0.0), 0)
        value = tl.load(part + (row * K + pair) * H + at, mask=inside & used, other=0.0)
        total += tl.where(used, weight, 0.0) * value
    dtype = out.dtype.element_ty
    if shared is not None:
        product = tl.load(shared + row * H + at, mask=inside, other=0.0).to(tl.float32)
        if switch is not None:
            opened = tl.load(switch + row).to(tl.float32)
            opened = (1.0 / (1.0 + tl.exp(-opened))).to(dtype).to(tl.float32)
            product = (opened * product).to(dtype).to(tl.float32)
        total += product
    tl.store(out + row * H + at, (before + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)


def combine(
    part: Tensor,
    experts: Tensor,
    gates: Tensor,
    x: Tensor,
    *,
    out: Tensor,
    shared: Tensor | None = None,
    shared_switch: Tensor | None = None,
) -> None:
    """out = x + (Σ gate · part + sigmoid(switch) · shared), all [R, H]; out may be x.

    part: [R · k, H] fp32, a row per (row, rank) pair; experts: [R, k] int32, -1 contributes nothing; gates: [R, k]
    fp32. Pairs are added one after the other in ascending expert order, in fp32, and the sum is rounded to x's dtype
    before x is added. shared: [R, H] and shared_switch: [R, 1] in x's dtype; their product is rounded to it too.
    """
    rows, hidden = x.shape
    top_k = experts.shape[1]
    assert part.shape == (rows * top_k, hidden) and gates.shape == experts.shape, "a part and a gate per pair"
    assert all(t.is_contiguous() for t in (part, experts, gates, x, out)), "rows follow each other"
    assert shared_switch is None or shared is not None, "a switch without a shared expert"
    block = min(triton.next_power_of_2(hidden), 128 if rows <= 16 else 1024)
    overlap = overlapped(x)
    _combine[(rows, triton.cdiv(hidden, block))](
        part, experts, gates, x, out, shared, shared_switch,
        H=hidden, K=top_k, K_PAD=triton.next_power_of_2(top_k), BLOCK=block, OVERLAP=overlap,
        num_warps=1 if block <= 128 else 4, launch_pdl=overlap,
    )  # fmt: skip
