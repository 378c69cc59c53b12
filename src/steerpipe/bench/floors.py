"""The physical limits that a measured time is printed under. Pure arithmetic; seconds and bytes.

Resident: every weight that a step uses is read once from the GPU's memory. On demand: the step without its expert
kernels, then every missed block over the link. Prefill: the slower of the two, since one can hide the other.
"""

from dataclasses import dataclass

from steerpipe.bench.shapes import Shape


@dataclass(frozen=True, slots=True)
class ActiveBytes:
    """What one step reads, once each, whatever the batch."""

    dense: int
    kv: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.kv + self.experts


def active_bytes(
    shape: Shape, item_bytes: int, context: int, batch: int, experts_per_layer: float, expert_bytes: int | None = None
) -> ActiveBytes:
    """`experts_per_layer`: distinct ones in a step, top-k for one row. `item_bytes`: of dense weights and KV.

    `expert_bytes`: of one expert in the form that is computed with; None: as it is packed.
    """
    blocks = round(shape.layers * experts_per_layer)
    return ActiveBytes(
        dense=shape.dense_bytes(item_bytes),
        kv=batch * shape.kv_bytes(context, item_bytes),
        experts=blocks * (shape.layout.block_bytes if expert_bytes is None else expert_bytes),
    )


def resident_floor(active: ActiveBytes, memory_rate: float) -> float:
    """Seconds to read what a step uses at `memory_rate` bytes per second."""
    return active.total / memory_rate


def on_demand_floor(resident_step: float, expert_kernels: float, missed_bytes: float, link_rate: float) -> float:
    """(resident step - expert kernels) + missed bytes / link rate: nothing overlaps the copies."""
    return max(0.0, resident_step - expert_kernels) + missed_bytes / link_rate


def prefill_floor(missing_bytes: float, link_rate: float, resident_prefill: float) -> float:
    """max(copy floor, resident prefill)."""
    return max(missing_bytes / link_rate, resident_prefill)
