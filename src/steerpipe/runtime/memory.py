"""What lies where, with bytes: the table that a run prints before it starts."""

from collections.abc import Iterator
from dataclasses import dataclass

from steerpipe.core.budget import ExpertBudget, ExpertFacts
from steerpipe.core.geometry import KV_BLOCK_TOKENS
from steerpipe.core.pages import PagePlan
from steerpipe.core.resolve import ITEM_BYTES, Facts, ResolvedConfig
from steerpipe.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryRow:
    what: str
    where: str
    size_bytes: int
    why: str


def memory_rows(
    config: ResolvedConfig, facts: Facts, budget: ExpertBudget, experts: ExpertFacts
) -> tuple[MemoryRow, ...]:
    """Every tier that holds something."""
    fast = "GPU" if config.device == "cuda" else "RAM"
    kv_why = next(choice.reason for choice in config.choices if choice.name == "kv_memory")
    rows = [
        MemoryRow("dense weights", fast, facts.resident_parameters * ITEM_BYTES[config.dtype], config.dtype),
    ]
    if budget.pages is not None:
        rows.append(_shared(budget.pages, config.kv_memory_bytes, budget.reason, fast))
    else:
        rows.append(MemoryRow("keys and values, at most", fast, config.kv_memory_bytes, kv_why))
    if experts.experts and budget.pages is None:
        share = budget.slots / experts.experts
        held = "as packed" if config.device == "cuda" else "unpacked"
        slots = f"{budget.slots} of {experts.experts} experts ({share:.1%}), {held}: {budget.reason}"
        rows.append(MemoryRow("expert slots", fast, budget.slots * experts.slot_bytes, slots))
    rows.extend(_behind(budget, experts.block_bytes))
    if not budget.resident:
        pace = f", slowed to {budget.pace / 1e9:.3g} GB/s" if budget.pace else ""
        rows.append(MemoryRow("all experts", "disk", experts.experts * experts.block_bytes, f"the pack{pace}"))
    return tuple(rows)


def _shared(plan: PagePlan, kv_bytes: int, reason: str, where: str) -> MemoryRow:
    shape = plan.shape
    each = f"{format_bytes(shape.page_bytes)}: {shape.slots} experts, or {shape.blocks * KV_BLOCK_TOKENS} tokens"
    why = f"{plan.pages} pages of {each}; keys and values take at most {format_bytes(kv_bytes)}: {reason}"
    return MemoryRow("experts, and keys and values", where, plan.total_bytes, why)


def _behind(budget: ExpertBudget, block_bytes: int) -> Iterator[MemoryRow]:
    """RAM behind the slots: page-locked memory, which a GPU copies from by itself, and the rest."""
    pageable = budget.ram_bytes - budget.pinned_bytes
    if budget.pinned_bytes:
        held = f"{budget.pinned_bytes // block_bytes} raw blocks: {budget.ram_reason}"
        yield MemoryRow("experts behind the slots", "page-locked RAM", budget.pinned_bytes, held)
    if pageable:
        yield MemoryRow("experts behind the slots", "RAM", pageable, f"{pageable // block_bytes} raw blocks")
