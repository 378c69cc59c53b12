"""Small made-up models: blocks that differ in every byte, in memory that no GPU has to pin."""

import ctypes
from collections.abc import Callable, Collection, Mapping
from random import Random

import torch

from steerpipe.core.blocks import BlockForm
from steerpipe.transfer.cuda.backing import LayerBlocks, PinnedBacking
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.ring import Ring
from steerpipe.transfer.slabs import Slab

CPU = torch.device("cpu")
PAGE = 4096
LAYERS, EXPERTS = 3, 6
NAMES = (1, 2, 4)  # the layers that have experts


def made_up(experts: int = EXPERTS, pages: Mapping[int, int] | None = None) -> dict[int, LayerBlocks]:
    form = BlockForm("bfloat16", 16, 8, 0, 512)
    return {layer: LayerBlocks(experts, form, PAGE * (pages or {}).get(layer, 1)) for layer in NAMES}


def contents(layers: Mapping[int, LayerBlocks], seed: int = 0) -> list[bytes]:
    """By the experts' numbers."""
    random = Random(seed)
    return [random.randbytes(each.block_bytes) for each in layers.values() for _ in range(each.experts)]


def backing(
    blocks: list[bytes], copier: Copier, in_ring: Collection[int] = (), *, slabs: int = 2, readers: int = 1,
    before: Callable[[int], None] = lambda number: None,
) -> PinnedBacking:  # fmt: skip
    """Those of `in_ring` are read by threads, which call `before` first."""
    stride = max(map(len, blocks))
    numbers = [number for number in range(len(blocks)) if number not in in_ring]
    arena = PinnedArena(max(1, len(numbers)) * stride)
    for position, number in enumerate(numbers):
        arena.view[position * stride : position * stride + len(blocks[number])] = blocks[number]
    arena.pin()

    def fetch(number: int, slab: Slab) -> None:
        before(number)
        ctypes.memmove(slab.tensor.data_ptr(), blocks[number], len(blocks[number]))

    ring = space = None
    if in_ring:
        space = PinnedArena(slabs * stride)
        space.pin()
        ring = Ring(fetch, space.slabs(stride), copier, readers)
    return PinnedBacking(arena, numbers, stride, ring=ring, slabs=space)
