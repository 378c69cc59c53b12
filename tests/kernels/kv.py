"""KV blocks in plain memory for kernel tests: a table of addresses, poisoned wherever nothing was stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
LAYER = 1  # kernels are given this layer of LAYERS: offsets count
LAYERS = 3


@dataclass(frozen=True, slots=True)
class Cache:
    """The blocks of `rows` sequences: memory is [rows · B, LAYERS, 2, kv_heads, BLOCK, D], laid out in random order."""

    memory: Tensor
    order: Tensor  # [rows, B]: which block of memory
    blocks: Tensor  # [rows, B] int64 addresses

    @property
    def layer_bytes(self) -> int:
        return LAYER * self.memory[0, 0].nbytes

    def dense(self) -> Tensor:
        """[2, rows, kv_heads, S, D]: keys and values of the layer in the order of positions."""
        picked = self.memory[self.order, LAYER]  # [rows, B, 2, kv_heads, BLOCK, D]
        return picked.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def cache(
    rows: int,
    blocks: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    fill: float | None = None,
) -> Cache:
    """Blocks of random values, or of `fill`."""
    memory = torch.empty(rows * blocks, LAYERS, 2, kv_heads, BLOCK, head_dim, dtype=dtype, device=device)
    if fill is None:
        memory.copy_(torch.randn(memory.shape, device=device))
    else:
        memory.fill_(fill)
    order = torch.randperm(rows * blocks).view(rows, blocks)
    addresses = memory.data_ptr() + order * memory[0].nbytes
    return Cache(memory, order.to(device), addresses.to(device))


def forget(cache: Cache, positions: Tensor) -> None:
    """Poisons what no row may read: all layers but one, and everything beyond each row's position."""
    for layer in range(LAYERS):
        if layer != LAYER:
            cache.memory[:, layer] = torch.nan
    for row, position in enumerate(positions.tolist()):
        for index, block in enumerate(cache.order[row].tolist()):
            kept = min(max(position + 1 - index * BLOCK, 0), BLOCK)
            cache.memory[block, LAYER, 0, :, kept:] = torch.nan
            cache.memory[block, LAYER, 1, :, kept:] = torch.inf
