"""Experts into blocks and back. Legend: H hidden, I expert width."""

import numpy as np
import torch
from torch import Tensor

from steerpipe.core.errors import PackError
from steerpipe.core.protocols import ExpertWeights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import BlockLayout, Part
from steerpipe.store.quant import (
    dequantise_int4,
    dequantise_int4_small,
    dequantise_int8,
    quantise_int4,
    quantise_int8,
)

TORCH_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "int8": torch.int8, "int4": torch.uint8,
}  # fmt: skip

# Dequantising makes temporaries of several bytes per weight: 20 MB for an int4 expert of 512 x 992. By strips they stay
# small, and large experts are no slower for it (2048 x 1408 to bf16: int4 5.3 ms instead of 7.2, int8 2.9 instead of
# 5.3; 512 x 992: int4 0.95 instead of 0.85; one core, medians of 25).
STRIP_WEIGHTS = 1 << 18
SMALL_BYTES = 1 << 15  # of a block: numpy's calls cost less than torch's (192 x 48: 45 us instead of 111)


def encode(layout: BlockLayout, gate: Tensor, up: Tensor, down: Tensor, name: str) -> Tensor:
    """gate [I, H], up [I, H], down [H, I] → one block, uint8 [block_bytes], padded with zeros.

    Raises PackError naming `name` if the format cannot hold a weight. A format equal to the stored dtype copies bits.
    """
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    _encode_matrix(layout, block, "gate_up", torch.cat((gate, up)), f"gate and up of {name}")  # [2I, H]
    _encode_matrix(layout, block, "down", down, f"down of {name}")  # [H, I]
    return block


def decode(layout: BlockLayout, block: Tensor, dtype: torch.dtype, out: ExpertWeights | None = None) -> ExpertWeights:
    """One expert, compute-ready in `dtype`. `block` is uint8 [block_bytes], contiguous, on any device.

    With `out` the weights are written there (its dtype counts) and `out` is returned. Without, the result owns its
    memory, unless the block holds `dtype` already: then it is a view of the block.
    """
    assert block.numel() == layout.block_bytes, f"a block of {block.numel()} bytes instead of {layout.block_bytes}"
    if out is not None and _is_small(layout, block, out):
        _decode_small(layout, block, out)
        return out
    gate_up = _decode_matrix(layout, block, "gate_up", dtype, out.gate_up if out else None)  # [2I, H]
    down = _decode_matrix(layout, block, "down", dtype, out.down if out else None)  # [H, I]
    return out or ExpertWeights(gate_up, down)


def split(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """gate [I, H], up [I, H], down [H, I]: views."""
    width = weights.down.shape[1]
    return weights.gate_up[:width], weights.gate_up[width:], weights.down


def _encode_matrix(layout: BlockLayout, block: Tensor, part: str, weight: Tensor, name: str) -> None:
    place = layout.part(part)
    assert weight.shape == (place.rows, place.columns), (
        f"{name} is {list(weight.shape)}, not {place.rows} x {place.columns}"
    )
    if layout.format is ExpertFormat.INT8:
        codes, scales = quantise_int8(weight, name)
    elif layout.format is ExpertFormat.INT4:
        codes, scales = quantise_int4(weight, place.columns // layout.part(f"{part}.scale").columns, name)
    else:
        _view(block, place).copy_(convert(weight, TORCH_DTYPES[place.dtype], name))
        return
    _view(block, place).copy_(codes)
    _view(block, layout.part(f"{part}.scale")).copy_(scales)


def _decode_matrix(layout: BlockLayout, block: Tensor, part: str, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    codes = _view(block, layout.part(part))
    if not layout.format.quantised:
        return codes.to(dtype) if out is None else out.copy_(codes)
    dequantise = dequantise_int8 if layout.format is ExpertFormat.INT8 else dequantise_int4
    scales = _view(block, layout.part(f"{part}.scale"))
    if out is None:
        return dequantise(codes, scales, dtype, None)
    strip = max(1, STRIP_WEIGHTS // out.shape[1])  # rows
    for row in range(0, len(out), strip):
        dequantise(codes[row : row + strip], scales[row : row + strip], dtype, out[row : row + strip])
    return out


def _is_small(layout: BlockLayout, block: Tensor, out: ExpertWeights) -> bool:
    small = layout.format is ExpertFormat.INT4 and layout.block_bytes <= SMALL_BYTES
    weights = (out.gate_up, out.down)
    return small and block.is_cpu and all(weight.is_cpu and weight.dtype is torch.float32 for weight in weights)


def _decode_small(layout: BlockLayout, block: Tensor, out: ExpertWeights) -> None:
    """The same numbers as `_decode_matrix` gives, with a third of the calls."""
    stored = block.numpy()
    for name, weight in (("gate_up", out.gate_up), ("down", out.down)):
        codes, scales = (
            stored[part.offset : part.offset + part.size_bytes]
            for part in (layout.part(name), layout.part(f"{name}.scale"))
        )
        dequantise_int4_small(codes, scales.view(np.float16), weight.numpy())


def convert(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Rounds to `dtype`; refuses a finite weight that would become infinite."""
    converted = weight.to(dtype)
    if converted.dtype != weight.dtype and bool((torch.isinf(converted) & torch.isfinite(weight)).any()):
        raise PackError(
            f"{name} has a weight of {float(weight.abs().max()):.3g}, which {dtype} cannot hold",
            fix="pack with the native format, or with bfloat16",
        )
    return converted


def _view(block: Tensor, part: Part) -> Tensor:
    """The part as a matrix that shares the block's memory; int4 has half as many columns, two codes to a byte."""
    columns = part.columns // 2 if part.dtype == "int4" else part.columns
    bytes_of_part = block[part.offset : part.offset + part.size_bytes]
    return bytes_of_part.view(TORCH_DTYPES[part.dtype]).view(part.rows, columns)
