"""How much memory the experts get where keys and values take their pages from it. Pure."""

from steerpipe.core.budget import MARGIN, NO_EXPERTS, ExpertBudget, ExpertFacts, plan_budget, slots_asked, whole_blocks
from steerpipe.core.budget_cuda import beside_slots, card_room, plan_behind, plan_cuda_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.pages import page_shape, plan_pages
from steerpipe.core.units import format_bytes, parse_bytes


def plan_shared_budget(
    config: EngineConfig, facts: ExpertFacts, kv_blocks: int, kv_block_bytes: int, free_bytes: int
) -> ExpertBudget:
    """`free_bytes` is what dense weights leave. Where all experts fit beside keys and values, nothing is shared."""
    if facts.experts == 0:
        return NO_EXPERTS
    if config.fast_memory == "auto" and config.ram is None:
        room = int(free_bytes * (1 - MARGIN))
        if config.pace is None and facts.experts * facts.slot_bytes + kv_blocks * kv_block_bytes <= room:
            return plan_budget(config, facts, free_bytes - kv_blocks * kv_block_bytes)
        fast, reason = room, f"what is free less {MARGIN:.0%}"
    elif config.fast_memory == "auto":
        fast, reason = parse_bytes(config.ram or "0"), f"{config.ram} of RAM"
    else:
        fast, reason = _asked(config.fast_memory, facts), "as set"
    plan = plan_pages(fast, page_shape(kv_block_bytes, facts.slot_bytes), kv_blocks, facts.experts)
    behind = 0 if config.ram is None else parse_bytes(config.ram) - plan.total_bytes
    if behind < 0:
        raise ConfigError(
            f"fast_memory takes {format_bytes(plan.total_bytes)}, but ram is only {config.ram}",
            fix="without a GPU the pages lie in RAM: raise ram, or lower fast_memory",
        )
    behind = whole_blocks(behind, facts)
    if plan.total_bytes + behind > free_bytes:
        raise CapacityError(
            f"{plan.pages} pages take {format_bytes(plan.total_bytes)}, but {format_bytes(max(0, free_bytes))} of "
            "memory are free beside dense weights",
            fix="lower fast_memory or ram",
        )
    pace = None if config.pace is None else float(parse_bytes(config.pace))
    return ExpertBudget(plan.slots, behind, pace, resident=False, reason=reason, pages=plan)


def plan_shared_cuda_budget(
    config: EngineConfig, facts: ExpertFacts, kv_blocks: int, kv_block_bytes: int, free_bytes: int, free_ram_bytes: int
) -> ExpertBudget:
    """With a GPU: `free_bytes` is what dense weights leave on the card; RAM behind the pages as behind slots."""
    if facts.experts == 0:
        return NO_EXPERTS
    room, beside_kv = free_bytes - beside_slots(config, facts), free_bytes - kv_blocks * kv_block_bytes
    if config.fast_memory == "auto":
        if config.pace is None and facts.experts * facts.slot_bytes <= card_room(config, facts, beside_kv):
            return plan_cuda_budget(config, facts, beside_kv, free_ram_bytes)
        fast, reason = max(0, card_room(config, facts, free_bytes)), "what the GPU has free less a margin"
    else:
        fast, reason = _asked(config.fast_memory, facts), "as set"
    plan = plan_pages(fast, page_shape(kv_block_bytes, facts.slot_bytes), kv_blocks, facts.experts)
    if plan.total_bytes > room:
        raise CapacityError(
            f"{plan.pages} pages take {format_bytes(plan.total_bytes)}, but {format_bytes(max(0, room))} of GPU memory "
            "are free beside dense weights and what a step takes",
            fix="lower fast_memory or prefill_chunk",
        )
    pace = None if config.pace is None else float(parse_bytes(config.pace))
    behind = plan_behind(config, facts, free_ram_bytes)
    return ExpertBudget(
        plan.slots, behind.ram_bytes, pace, resident=False, reason=reason, pinned_bytes=behind.pinned_bytes,
        ram_reason=behind.reason, pages=plan,
    )  # fmt: skip


def _asked(fast_memory: str, facts: ExpertFacts) -> int:
    if fast_memory.endswith("%"):
        return slots_asked(fast_memory, facts) * facts.slot_bytes
    return parse_bytes(fast_memory)
