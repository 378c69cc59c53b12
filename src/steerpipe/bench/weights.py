"""Made-up weights of a shape, drawn where they are used and never written to disk.

They keep activations finite and say what kernels and links do; what they route to means nothing (see `routing`).
Legend: H hidden, I expert width.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from steerpipe.bench.shapes import Shape
from steerpipe.model.tensors import dense_tensors
from steerpipe.model.weights import ModelWeights, build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import BlockLayout, Part

_CODE_RMS = {ExpertFormat.INT8: 73.3, ExpertFormat.INT4: 4.64}  # of uniform codes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Drawn(Mapping[str, Tensor]):
    """Dense weights by their names on disk, each drawn when it is asked for: no second copy of a model is ever held."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._shapes = dense_tensors(shape.spec, shape.family.names)
        self._dtype, self._device = dtype, device
        self._random = torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:  # norms are 1, biases 0
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, dtype=self._dtype, device=self._device)
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(0.0, shape[-1] ** -0.5, generator=self._random)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def draw_dense(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Everything but the experts, compute-ready on the device."""
    return build_weights(shape.spec, shape.family.names, _Drawn(shape, dtype, device, seed), dtype, device)


def draw_block(layout: BlockLayout, block: Tensor, random: torch.Generator) -> None:
    """Fills one raw block (uint8 [block_bytes], on any device) with an expert of unit gain."""
    assert block.numel() == layout.block_bytes, f"a block of {block.numel()} bytes instead of {layout.block_bytes}"
    for part in layout.parts:
        memory = block[part.offset : part.offset + part.size_bytes]
        if part.name.endswith(".scale"):
            memory.view(torch.float16).fill_(_scale(layout, layout.part(part.name.removesuffix(".scale"))))
        elif part.dtype in _DTYPES:
            memory.view(_DTYPES[part.dtype]).normal_(0.0, part.columns**-0.5, generator=random)
        elif part.dtype == "int8":
            memory.view(torch.int8).random_(-127, 128, generator=random)
        else:  # int4: any byte is two codes
            memory.random_(0, 256, generator=random)


def _scale(layout: BlockLayout, codes: Part) -> float:
    """With which uniform codes have the spread of 1 / sqrt(inputs)."""
    return 1.0 / (math.sqrt(codes.columns) * _CODE_RMS[layout.format])
