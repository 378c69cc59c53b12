"""All experts of a shape in the device's memory, made up on the spot: what a budget is measured against."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.bench.shapes import Shape
from steerpipe.bench.weights import draw_block
from steerpipe.core.blocks import BlockForm, BlockLease
from steerpipe.core.errors import CapacityError
from steerpipe.core.units import format_bytes
from steerpipe.store.blocks import decode
from steerpipe.store.resident import ResidentExperts


@dataclass(frozen=True, slots=True)
class _Whole:
    """Everything that was asked for, in one wave."""

    experts: tuple[int, ...]

    def waves(self) -> Iterator[tuple[int, ...]]:
        yield self.experts


class ResidentBlocks:
    """A BlockSource that never waits: every expert of a shape as a raw block, drawn straight into its slot."""

    resident = True
    landing = None

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self._form = shape.layout.form
        self._memory = _allocate(shape, device)
        random = torch.Generator(device).manual_seed(seed)
        for block in self._memory:
            draw_block(shape.layout, block, random)
        first, step = self._memory.data_ptr(), shape.layout.block_bytes
        addresses = torch.arange(shape.all_experts, dtype=torch.int64) * step + first
        rows = addresses.view(shape.layers, shape.moe.experts).to(device)  # [layers, E]
        self._tables = dict(zip(shape.spec.moe_layers, rows.unbind(), strict=True))

    def form(self, layer: int) -> BlockForm:
        return self._form

    def table(self, layer: int) -> Tensor:
        return self._tables[layer]

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[BlockLease]:
        return nullcontext(_Whole(tuple(sorted(routed))))

    def serves(self, experts_per_layer: int) -> bool:
        return True

    def begin(self) -> None:
        """Nobody will serve."""

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        """Everything is there."""

    def release(self) -> None:
        """Nobody ever waits."""

    def close(self) -> None:
        """Gives the blocks back; the tables point nowhere from now on."""
        self._memory = self._memory[:0].clone()


def resident_experts(shape: Shape, dtype: torch.dtype, seed: int = 0) -> ResidentExperts:
    """The same for the decoder on a CPU: compute-ready."""
    random = torch.Generator().manual_seed(seed)
    layers = {}
    for layer in shape.spec.moe_layers:
        blocks = torch.empty(shape.moe.experts, shape.layout.block_bytes, dtype=torch.uint8)
        for block in blocks:
            draw_block(shape.layout, block, random)
        layers[layer] = [decode(shape.layout, block, dtype) for block in blocks]
    return ResidentExperts(layers)


def _allocate(shape: Shape, device: torch.device) -> Tensor:
    """[experts, block_bytes] uint8."""
    try:
        return torch.empty(shape.all_experts, shape.layout.block_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as problem:
        if "memory" not in str(problem):
            raise
        raise CapacityError(
            f"all experts of {shape.name} take {format_bytes(shape.expert_bytes)}, more than {device} has free",
            fix="choose a smaller --format or --shape, or leave --residency 100 out",
        ) from None
