"""How a predictor's numbers are kept in a file: as they are, or in 16, 8 or 4 bits.

Loading gives fp32 of what was kept, so a file always loads to the same bits.
"""

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

_LEAST_NUMBERS = 1024  # smaller tensors are kept as they are: they save nothing
_LEAST_WIDTH = 128  # narrower rows are not worth the scales of 4 bits: they take 8
_GROUP = 32  # numbers of a row that share a scale in 4 bits
_SCALE, _GROUP_SCALE, _WIDTH = ".row_scale", ".group_scale", ".row_width"


class Storage(StrEnum):
    EXACT = "exact"
    FLOAT16 = "float16"
    INT8 = "int8"  # one scale per row of the last dimension
    INT4 = "int4"  # one scale per 32 of a row; narrow tensors as INT8


def stored(tensors: Mapping[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """What to write, by name. Integers and small tensors are kept as they are."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        small = not own.is_floating_point() or own.numel() < _LEAST_NUMBERS or own.dim() < 2
        if storage is Storage.EXACT or small:
            kept[name] = own.clone()  # parts of one predictor may share a tensor; a file may not
        elif storage is Storage.FLOAT16:
            kept[name] = own.half()
        elif storage is Storage.INT4 and own.shape[-1] >= _LEAST_WIDTH:
            kept |= _as_int4(name, own.float())
        else:
            scale = own.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            kept |= {name: (own.float() / scale).round().to(torch.int8), name + _SCALE: scale}
    return kept


def restored(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `stored`, by their own names."""
    found = {}
    for name, tensor in kept.items():
        if name.endswith((_SCALE, _GROUP_SCALE, _WIDTH)):
            continue
        if name + _SCALE in kept:
            found[name] = tensor.float() * kept[name + _SCALE]
        elif name + _GROUP_SCALE in kept:
            found[name] = _from_int4(tensor, kept[name + _GROUP_SCALE], int(kept[name + _WIDTH]))
        else:
            found[name] = tensor
    return found


def in_four_bits(tensor: Tensor) -> Tensor:
    """What INT4 leaves of it, on its own device; a tensor that is too narrow for 4 bits stays as it is."""
    if tensor.shape[-1] < _LEAST_WIDTH:
        return tensor
    levels, scale = _levels(tensor)
    return (levels * scale.float()).flatten(-2)[..., : tensor.shape[-1]]


def _levels(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(whole numbers from -7 to 7 [..., groups, 32], their scales [..., groups, 1] in 16 bits)."""
    grouped = F.pad(tensor, (0, -tensor.shape[-1] % _GROUP)).unflatten(-1, (-1, _GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp_min(2**-14).half()
    return (grouped / scale.float()).round().clamp(-7, 7), scale


def _as_int4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Two numbers in a byte, the even one in its low half."""
    levels, scale = _levels(tensor)
    bytes_of = (levels + 8).to(torch.uint8).flatten(-2)
    packed = bytes_of[..., 0::2] | bytes_of[..., 1::2] << 4
    return {name: packed, name + _GROUP_SCALE: scale.squeeze(-1), name + _WIDTH: torch.tensor(tensor.shape[-1])}


def _from_int4(packed: Tensor, scale: Tensor, width: int) -> Tensor:
    levels = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).float() - 8
    whole: Tensor = (levels.unflatten(-1, (-1, _GROUP)) * scale.float()[..., None]).flatten(-2)
    return whole[..., :width].contiguous()
