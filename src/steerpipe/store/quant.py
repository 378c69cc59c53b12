"""The arithmetic of the quantised formats; every kernel is tested against it.

A weight is code x scale, computed in float32, where the product is exact (an int8 or int4 times a float16 has at most
19 significant bits), and rounded to the wanted dtype once at the end.

int8: codes -127 to 127, one scale per row from its largest weight: no weight is off by more than half a step.
int4: codes -8 to 7, one scale per group of inputs. Scales may be negative, so that the group's extreme weight gets the
side that reaches to 8. How much of the extreme is clipped is chosen by squared error among CLIPS, then scale and codes
are fitted to each other twice. On Gaussian weights in groups of 32 the relative error is .081; with min/max, .097.
A byte holds code + 8 of column j (low) and of column j + group/2 (high) of one group: both share a scale.

Legend: R rows (outputs), C columns (inputs), S scales per row, G group.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.errors import PackError

CLIPS = tuple(6.0 + 0.25 * step for step in range(21))  # the extreme weight is this many steps; beyond 8 it is clipped
FITS = 2
_FLOAT16_MAX = 65504.0


def quantise_int8(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """[R, C] → codes int8 [R, C], scales float16 [R, 1]. PackError naming `name` if a weight has no such form."""
    wide = _finite(weight, name, largest=127 * _FLOAT16_MAX)
    extreme = wide.abs().amax(1, keepdim=True)  # [R, 1]
    scales = (extreme / 127).to(torch.float16)
    short = scales.float() * 127.5 < extreme  # a rounded tiny scale may be too small to reach the extreme
    scales = torch.where(short, (scales.view(torch.int16) + 1).view(torch.float16), scales)  # the next float16 up
    codes = (wide * _inverse(scales.float())).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def dequantise_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weights [R, C] in `dtype`, into `out` where given."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    return torch.mul(codes, scales.float(), out=out)


def quantise_int4(weight: Tensor, group: int, name: str) -> tuple[Tensor, Tensor]:
    """[R, C] → codes uint8 [R, C/2], scales float16 [R, C/G]. PackError naming `name` if a weight has no such form."""
    wide = _finite(weight, name, largest=CLIPS[0] * _FLOAT16_MAX)
    rows, columns = wide.shape
    grouped = wide.view(rows, columns // group, group)  # [R, S, G]
    scales = _fit(grouped, _search(grouped))  # [R, S, 1]
    codes = (_codes(grouped, scales) + 8).to(torch.uint8)  # [R, S, G], 0 to 15
    low, high = codes[..., : group // 2], codes[..., group // 2 :]
    return (low | (high << 4)).reshape(rows, columns // 2), scales.squeeze(2).to(torch.float16)


def dequantise_int4(codes: Tensor, scales: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weights [R, C] in `dtype`, into `out` (contiguous) where given. The group follows from the shapes."""
    rows, half_columns = codes.shape
    groups = scales.shape[1]
    out = torch.empty((rows, 2 * half_columns), dtype=dtype, device=codes.device) if out is None else out
    packed = codes.view(rows, groups, 1, half_columns // groups)  # [R, S, 1, G/2]
    # One uint8 buffer, shifted by 8 with wrap-around and read as int8: half the time of working in float32.
    signed = torch.cat((packed & 15, packed >> 4), 2).sub_(8).view(torch.int8).view(rows, groups, -1)  # [R, S, G]
    torch.mul(signed, scales.float().unsqueeze(2), out=out.view(rows, groups, -1))
    return out


def dequantise_int4_small(codes: NDArray[np.uint8], scales: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """The same into `out`, any shapes of the right sizes, all contiguous: below some 16 KiB of codes an operation of
    torch costs more to call than to run."""
    assert out.flags.c_contiguous, "the weights would go to a copy of `out`"
    packed = codes.reshape(scales.size, -1)  # [R S, G/2]
    signed = np.empty((len(packed), 2, packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=signed[:, 0])
    np.right_shift(packed, 4, out=signed[:, 1])
    np.subtract(signed, 8, out=signed)
    np.multiply(signed.view(np.int8), scales.astype(np.float32).reshape(-1, 1, 1), out=out.reshape(signed.shape))


def _search(grouped: Tensor) -> Tensor:
    """The best of CLIPS for each group: scales [R, S, 1] in float32, each a float16."""
    extreme = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # [R, S, 1], signed
    best_scales = (extreme / -CLIPS[0]).to(torch.float16).float()
    best_errors = _errors(grouped, best_scales)
    for clip in CLIPS[1:]:
        scales = (extreme / -clip).to(torch.float16).float()
        errors = _errors(grouped, scales)
        better = errors < best_errors
        best_scales = torch.where(better, scales, best_scales)
        best_errors = torch.where(better, errors, best_errors)
    return best_scales


def _fit(grouped: Tensor, scales: Tensor) -> Tensor:
    """Least squares for the scale given the codes, kept where it helps after rounding to float16."""
    errors = _errors(grouped, scales)
    for _ in range(FITS):
        codes = _codes(grouped, scales)
        fitted = (grouped * codes).sum(2, keepdim=True) / codes.square().sum(2, keepdim=True).clamp_(min=1)
        fitted = fitted.to(torch.float16).float()
        fitted_errors = _errors(grouped, fitted)
        better = fitted_errors < errors
        scales, errors = torch.where(better, fitted, scales), torch.where(better, fitted_errors, errors)
    return scales


def _codes(grouped: Tensor, scales: Tensor) -> Tensor:
    return (grouped * _inverse(scales)).round_().clamp_(-8, 7)


def _errors(grouped: Tensor, scales: Tensor) -> Tensor:
    """Squared error of each group, [R, S, 1]."""
    return _codes(grouped, scales).mul_(scales).sub_(grouped).square_().sum(2, keepdim=True)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 for a scale of 0: a group of zeros has codes of zero."""
    return torch.where(scales == 0, 0.0, scales.reciprocal())


def _finite(weight: Tensor, name: str, *, largest: float) -> Tensor:
    """`weight` in float32, checked."""
    wide = weight.float().contiguous()
    bad = int((~torch.isfinite(wide)).sum())
    if bad:
        raise PackError(
            f"{name} has {bad} of {wide.numel()} values that are NaN or infinite",
            fix="the checkpoint is damaged or its training diverged: take another; only the native format copies them",
        )
    if wide.numel() and float(wide.abs().max()) > largest:
        raise PackError(
            f"{name} has a weight of {float(wide.abs().max()):.3g}, beyond the {largest:.3g} that the format can hold",
            fix="pack with the native format",
        )
    return wide
