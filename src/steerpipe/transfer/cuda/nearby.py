"""Experts in pinned memory, computed there by the CPU while the link brings others: the policy `cpu` on a GPU.

bf16 products of the codes as they lie: an int8 row is scaled afterwards, in fp32. So the sum is rounded otherwise than
the kernels', which is why this is a lossy mode (docs/quality.md). Legend: H hidden, I width, n rows.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.blocks import BlockForm
from steerpipe.core.quality import computed_share
from steerpipe.model.layers import gated_activation
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.nearby import CpuTime

_TIMED_COPIES = 8
_VECTOR = 16  # torch's product of bf16 rows and int8 codes reads whole ones, also behind the end of a row


class PinnedExperts:
    """Takes as many misses of a layer off the link as the CPU computes meanwhile. What is pinned never leaves."""

    def __init__(self, shelf: Shelf, layers: Mapping[int, LayerBlocks], device: torch.device) -> None:
        """Measures the link, which takes eight copies."""
        self.cpu = CpuTime()
        self._shelf = shelf
        self._layers = layers
        self.link_seconds = _time_link(shelf, device)

    def take(self, layer: int, experts: Sequence[int]) -> "PinnedBlocks | None":
        """See `transfer.nearby.RamExperts`."""
        base, places = self._shelf.base[layer], self._shelf.places
        share = computed_share(len(experts), self.link_seconds, self.cpu.block_seconds)
        taken = [expert for expert in experts if places[base + expert]][:share]
        if not share:
            self.cpu.left_out()
        return PinnedBlocks(self, layer, tuple(sorted(taken))) if taken else None

    def compute(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """x [n, H] → [n, H] fp32."""
        begin = time.perf_counter()
        blocks, number = self._layers[layer], self._shelf.base[layer] + expert
        block = _memory(self._shelf.places[number], blocks.block_bytes)
        result = block_ffn(x, block, blocks.form)
        self.cpu.note(time.perf_counter() - begin)
        return result


class PinnedBlocks:
    """A model.moe.Nearby."""

    def __init__(self, pinned: PinnedExperts, layer: int, experts: tuple[int, ...]) -> None:
        self._pinned = pinned
        self._layer = layer
        self.experts = experts

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self._pinned.compute(self._layer, expert, x)

    def let_go(self) -> None:
        """Nothing was held: what is pinned never leaves."""


def block_ffn(x: Tensor, block: Tensor, form: BlockForm) -> Tensor:
    """x [n, H] through the expert of a bf16 or int8 block (uint8, as it lies): [n, H] fp32."""
    rows = x.to(torch.bfloat16)
    inner = _product(rows, block, form, form.gate_up, form.gate_up_scale, (2 * form.width, form.hidden))
    hidden = gated_activation(inner).to(torch.bfloat16)  # [n, I]
    return _product(hidden, block, form, form.down, form.down_scale, (form.hidden, form.width))


def _product(x: Tensor, block: Tensor, form: BlockForm, start: int, scale: int, shape: tuple[int, int]) -> Tensor:
    """x [n, columns] times a matrix of the block: [n, rows] fp32."""
    rows, columns = shape
    if form.format == "bfloat16":
        weight = block[start : start + 2 * rows * columns].view(torch.bfloat16).view(rows, columns)
        return F.linear(x, weight).float()
    assert form.format == "int8", f"{form.format} blocks are not computed as they lie"
    codes = block[start : start + rows * columns].view(torch.int8).view(rows, columns)
    scales = block[scale : scale + 2 * rows].view(torch.float16).float()  # [rows]
    if columns % _VECTOR:
        return F.linear(x, codes.to(x.dtype)).float() * scales
    product: Tensor = torch.ops.aten._weight_int8pack_mm(x, codes, torch.ones(rows, dtype=x.dtype))  # noqa: SLF001
    return product.float() * scales


def _memory(address: int, size_bytes: int) -> Tensor:
    """Pinned memory as a tensor; it outlives every use of it here."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


def _time_link(shelf: Shelf, device: torch.device) -> float:
    """Seconds of one block from pinned memory to the device, on an idle link; 0 where nothing is pinned."""
    pinned = [number for number, place in enumerate(shelf.places) if place][:_TIMED_COPIES]
    if not pinned:
        return 0.0
    copier, into = shelf.copier, torch.empty(max(map(shelf.size_of, pinned)), dtype=torch.uint8, device=device)
    copier.drain()
    copier.copy(shelf.places[pinned[0]], into.data_ptr(), shelf.size_of(pinned[0]))
    copier.wait(copier.copied())
    begin = time.perf_counter()
    for number in pinned:
        copier.copy(shelf.places[number], into.data_ptr(), shelf.size_of(number))
    copier.wait(copier.copied())
    return (time.perf_counter() - begin) / len(pinned)
