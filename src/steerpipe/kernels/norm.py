"""RMS norm of several rows. R rows, H hidden."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from steerpipe.kernels.dense_configs import overlapped


@triton.jit
def _rms_norm(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    gain = tl.load(weight + at, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * H + at, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    # the product is rounded before and after the weight, as weight * (wide * scale).to(dtype) is
    normed = gain.to(tl.float32) * (wide * scale).to(values.dtype).to(tl.float32)
    tl.store(out + row * H + at, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    """x, out: [R, H] contiguous, weight: [H]. Statistics in fp32; a row depends on itself alone."""
    rows, hidden = x.shape
    assert x.is_contiguous() and out.is_contiguous(), "rms_norm reads whole rows"
    block = triton.next_power_of_2(hidden)
    overlap = overlapped(x)
    _rms_norm[(rows,)](
        x, weight, out, eps, H=hidden, BLOCK=block, OVERLAP=overlap,
        num_warps=8 if block > 2048 else 4, launch_pdl=overlap,
    )  # fmt: skip
