"""A source of made-up experts within a budget of slots, over page-locked memory that holds all of them."""

from types import TracebackType
from typing import Self

import torch

from steerpipe.bench.arena import SyntheticBacking
from steerpipe.bench.options import DRIVERS
from steerpipe.bench.rates import link_rate
from steerpipe.bench.shapes import Shape
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.cuda.stream import CudaCopier, copier_for
from steerpipe.transfer.machine import slots_of_share


class Ladder:
    """All blocks of a shape in page-locked memory, and the link from there. Sources are opened over it."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        """Fills and pins: about half a second per GiB. On a CPU nothing is pinned, and copies are at once."""
        self._shape, self._device = shape, device
        self._copier = copier_for(device)
        driver = self._copier.driver if isinstance(self._copier, CudaCopier) else None
        self.backing = SyntheticBacking(shape, driver, seed)

    def measure_link(self) -> float:
        """Bytes per second of scattered whole blocks, queued back to back."""
        return link_rate(self._copier, self.backing.addresses, self._shape.layout.block_bytes, self._device)

    def open(self, slots: int, policy: str, driver: str = "auto") -> CudaSource:
        """Its copier is its own, and ends with it."""
        shape = self._shape
        blocks = LayerBlocks(shape.moe.experts, shape.layout.form, shape.layout.block_bytes)
        layers = dict.fromkeys(shape.spec.moe_layers, blocks)
        return CudaSource(layers, self.backing, slots=slots, device=self._device, policy=policy, direct=DRIVERS[driver])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._copier.drain()
        self.backing.free()
        self._copier.close()


def slots_for(residency: float, shape: Shape, batch: int) -> int:
    """Slots of that many percent of all experts. For 0: what a step needs, and no more that could ever be a hit.

    Four layers' worth: a layer in use, and enough others that victims are always of layers long past.
    """
    if residency == 0:
        return min(4 * min(shape.moe.experts, batch * shape.moe.top_k), shape.all_experts // 2)
    return slots_of_share(residency / 100, shape.all_experts)
