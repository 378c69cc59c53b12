"""Every expert in memory, compute-ready: the source for models that fit, and the yardstick for those that do not.

Legend: H hidden, I expert width.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError
from steerpipe.core.protocols import ExpertWeights, Lease, Wave
from steerpipe.core.units import format_bytes
from steerpipe.model.spec import ModelSpec
from steerpipe.store.progress import Progress, silent

ALIGNMENT_BYTES = 64  # one cache line: what torch's allocator gives, and what vector loads want


class ExpertReader(Protocol):
    """A Checkpoint, a Pack, or anything that can read experts one by one."""

    @property
    def spec(self) -> ModelSpec: ...

    def read_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate [I, H], up [I, H], down [H, I] in any floating dtype. May touch the disk."""
        ...


@dataclass(frozen=True, slots=True)
class ResidentLease:
    """Everything that was asked for, in one wave. Holds nothing: residents never leave."""

    wave: Wave

    def waves(self) -> Iterator[Wave]:
        yield self.wave


class ResidentExperts:
    """An ExpertSource that never waits. Its tensors live as long as it does; many threads may lease at once."""

    def __init__(self, layers: Mapping[int, Sequence[ExpertWeights]]) -> None:
        self._layers = layers

    @classmethod
    def load(
        cls, source: ExpertReader, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> "ResidentExperts":
        """Reads every expert of `source` once, in layer order, rounding to `dtype` once. Blocks until all are there."""
        report = progress or silent
        total_bytes, done_bytes = resident_bytes(source.spec, dtype), 0
        report(0, total_bytes)
        layers: dict[int, list[ExpertWeights]] = {}
        for layer in source.spec.moe_layers:
            layers[layer] = []
            for expert in range(source.spec.moe(layer).experts):
                weights = _load_expert(source, layer, expert, dtype, device, total_bytes)
                layers[layer].append(weights)
                done_bytes += (weights.gate_up.numel() + weights.down.numel()) * dtype.itemsize
                report(done_bytes, total_bytes)
        return cls(layers)

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[Lease]:
        """Never waits; one wave with all of `routed`. Everything is kept anyway."""
        held = self._layers[layer]
        experts = tuple(sorted(routed))
        assert len(set(experts)) == len(experts), f"experts of layer {layer} leased twice at once: {experts}"
        return nullcontext(ResidentLease(Wave(experts, {index: held[index] for index in experts})))


def resident_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What all experts of a model take in compute-ready form."""
    widths = (spec.moe(layer).experts * spec.moe(layer).width for layer in spec.moe_layers)
    return 3 * spec.hidden * sum(widths) * dtype.itemsize


def _load_expert(
    source: ExpertReader, layer: int, expert: int, dtype: torch.dtype, device: torch.device, total_bytes: int
) -> ExpertWeights:
    gate, up, down = source.read_expert(layer, expert)
    width, hidden = gate.shape
    gate_up = _allocate((2 * width, hidden), dtype, device, total_bytes)  # [2I, H]
    gate_up[:width].copy_(gate)
    gate_up[width:].copy_(up)
    held_down = _allocate((hidden, width), dtype, device, total_bytes)  # [H, I]
    held_down.copy_(down)
    return ExpertWeights(gate_up, held_down)


def _allocate(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, total_bytes: int) -> Tensor:
    try:
        memory = torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as problem:  # torch.OutOfMemoryError on a GPU, "can't allocate memory" on a CPU
        if "memory" not in str(problem):
            raise
        raise CapacityError(
            f"all experts take {format_bytes(total_bytes)} as {dtype} on {device}, which is more than is free",
            fix="use a smaller dtype, or give a memory budget so that experts are loaded as they are needed",
        ) from None
    assert memory.data_ptr() % ALIGNMENT_BYTES == 0, "torch's allocator gave memory that is not aligned"
    return memory
