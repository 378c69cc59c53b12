"""Experts that lie in RAM beside a ladder's slots, computed there: the policy `cpu` where the CPU computes anyway.

The arithmetic is that of a slot, so the bits are too: what is saved is the way of the block into one. The engine's
thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from steerpipe.core.ids import ExpertId
from steerpipe.core.quality import computed_share
from steerpipe.model.moe import expert_ffn
from steerpipe.store.reader import Pack
from steerpipe.store.slots import SlotArena
from steerpipe.transfer.link import BlockAddress
from steerpipe.transfer.ram import RamTier

_AGAIN = 0.99  # what is thought of the CPU's time shrinks so with every layer that left it out: it is tried again
_NEWEST = 0.2  # weight of the last block in the running mean


class CpuTime:
    """Seconds that the CPU takes for a block, as measured; None before the first."""

    def __init__(self) -> None:
        self.block_seconds: float | None = None

    def note(self, seconds: float) -> None:
        before = self.block_seconds
        self.block_seconds = seconds if before is None else before + _NEWEST * (seconds - before)

    def left_out(self) -> None:
        if self.block_seconds is not None:
            self.block_seconds *= _AGAIN


class RamExperts:
    """Takes as many misses of a layer off the link as the CPU computes meanwhile."""

    def __init__(
        self, pack: Pack, tier: RamTier, addresses: Mapping[ExpertId, BlockAddress], dtype: torch.dtype,
        link_seconds: Callable[[], float],
    ) -> None:  # fmt: skip
        """`link_seconds`: how long a block takes over the link, as measured so far."""
        self.cpu = CpuTime()
        self._pack = pack
        self._tier = tier
        self._addresses = addresses
        self._dtype = dtype
        self._link_seconds = link_seconds
        self._scratch = SlotArena([each.layout for each in pack.manifest.classes], 1, dtype, torch.device("cpu"))

    def take(self, layer: int, experts: Sequence[int]) -> "HeldExperts | None":
        """Those of `experts`, missing and best first to be computed here, that are; they are held until they are let
        go. None: nobody."""
        held: dict[int, memoryview] = {}
        share = computed_share(len(experts), self._link_seconds(), self.cpu.block_seconds)
        for expert in experts:
            if len(held) < share and (block := self._tier.hold(self._address(layer, expert))) is not None:
                held[expert] = block
        if not share:
            self.cpu.left_out()
        return HeldExperts(self, layer, held) if held else None

    def compute(self, layer: int, block: memoryview, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        raw = torch.frombuffer(block, dtype=torch.uint8)
        layout = self._pack.layout(layer)
        as_it_lies = layout.format.value == str(self._dtype).removeprefix("torch.")
        out = None if as_it_lies else self._scratch.weights(0, layout)
        result = expert_ffn(x, self._pack.decode_block(layer, raw, self._dtype, out))
        self.cpu.note(time.perf_counter() - begin)
        return result

    def let_go(self, layer: int, expert: int) -> None:
        self._tier.let_go(ExpertId(layer, expert))

    def _address(self, layer: int, expert: int) -> BlockAddress:
        return self._addresses[ExpertId(layer, expert)]


class HeldExperts:
    """A model.moe.Nearby."""

    def __init__(self, ram: RamExperts, layer: int, blocks: dict[int, memoryview]) -> None:
        self._ram = ram
        self._layer = layer
        self._blocks = blocks
        self.experts = tuple(sorted(blocks))

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return self._ram.compute(self._layer, self._blocks[expert], x)

    def let_go(self) -> None:
        while self._blocks:
            expert, _ = self._blocks.popitem()
            self._ram.let_go(self._layer, expert)
