"""How much memory the experts get where there is a GPU: slots on the card, RAM (page-locked and not) behind them.

A slot holds the raw block, so slots and blocks have one size. What fits nowhere else is read from the disk.
Pure: no torch, no environment.
"""

from dataclasses import dataclass

from steerpipe.core.budget import (
    NO_EXPERTS,
    ExpertBudget,
    ExpertFacts,
    refuse_too_few,
    refuse_too_little,
    slots_asked,
    whole_blocks,
)
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.units import format_bytes, parse_bytes

# Left free on the card: cuBLAS' workspaces, graphs and activations of a prefill chunk. What a row takes most for is one
# float32 output per expert of its own: 64 KiB at Qwen3-30B's shape, 256 MiB of the margin for so many rows.
_CARD_MARGIN_BYTES = 1 << 30
_MARGIN_ROWS = 4096
_CARD_MARGIN = 0.02  # of what is free, where we choose: other processes grow
_RAM_MARGIN = 0.15  # of what is free: the page cache of the pack's file lies there too, and pages that are locked stay


def plan_cuda_budget(config: EngineConfig, facts: ExpertFacts, free_bytes: int, free_ram_bytes: int) -> ExpertBudget:
    """`free_bytes` is what dense weights and KV cache leave on the card. Errors name the smallest budget."""
    if facts.experts == 0:
        return NO_EXPERTS
    pace = None if config.pace is None else float(parse_bytes(config.pace))
    slots, reason = _slots(config, facts, free_bytes)
    if slots >= facts.experts and pace is None:
        return ExpertBudget(facts.experts, 0, pace, resident=True, reason=reason)
    behind = plan_behind(config, facts, free_ram_bytes)
    return ExpertBudget(
        slots, behind.ram_bytes, pace, resident=False, reason=reason, pinned_bytes=behind.pinned_bytes,
        ram_reason=behind.reason,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Behind:
    """RAM for raw blocks behind the slots; `pinned_bytes` of it are page-locked."""

    ram_bytes: int
    pinned_bytes: int
    reason: str


def plan_behind(config: EngineConfig, facts: ExpertFacts, free_ram_bytes: int) -> Behind:
    """Two tiers, and none of them of a single block."""
    ram, reason = _ram(config, facts, free_ram_bytes)
    pinned = _pinned(config, facts, ram, free_ram_bytes)
    return Behind(pinned + whole_blocks(max(0, ram - pinned), facts), pinned, reason)


def beside_slots(config: EngineConfig, facts: ExpertFacts) -> int:
    """Bytes of the card for a step, and a block of zeros for kernels of one that failed."""
    return facts.slot_bytes + _CARD_MARGIN_BYTES * max(_MARGIN_ROWS, config.prefill_chunk) // _MARGIN_ROWS


def card_room(config: EngineConfig, facts: ExpertFacts, free_bytes: int) -> int:
    """Bytes of the card that experts get where we choose. Negative: there are not even those that a step takes."""
    return int(free_bytes * (1 - _CARD_MARGIN)) - beside_slots(config, facts)


def _slots(config: EngineConfig, facts: ExpertFacts, free_bytes: int) -> tuple[int, str]:
    beside = beside_slots(config, facts)
    if config.fast_memory == "auto":
        room = card_room(config, facts, free_bytes)
        if facts.experts * facts.slot_bytes <= room:
            return facts.experts, "all experts fit on the GPU"
        refuse_too_little(room, free_bytes, facts, "GPU memory")
        return room // facts.slot_bytes, "what the GPU has free less a margin"
    slots = min(slots_asked(config.fast_memory, facts), facts.experts)
    refuse_too_few(slots, facts)
    if slots * facts.slot_bytes + beside > free_bytes:
        raise CapacityError(
            f"fast_memory takes {format_bytes(slots * facts.slot_bytes)} and a step {format_bytes(beside)} beside it, "
            f"but the GPU has {format_bytes(max(0, free_bytes))} free beside dense weights and keys and values",
            fix=f"lower fast_memory (at least {2 * facts.slot_bytes:,} bytes: two experts), prefill_chunk, kv_memory "
            "or max_context",
        )
    return slots, "as set"


def _ram(config: EngineConfig, facts: ExpertFacts, free_ram_bytes: int) -> tuple[int, str]:
    if config.ram is not None:
        return whole_blocks(parse_bytes(config.ram), facts), "as set"
    found = whole_blocks(int(free_ram_bytes * (1 - _RAM_MARGIN)), facts)
    every = found == facts.experts * facts.block_bytes
    return found, "all experts fit in RAM" if every else f"what is free less {_RAM_MARGIN:.0%}"


def _pinned(config: EngineConfig, facts: ExpertFacts, ram: int, free_ram_bytes: int) -> int:
    if config.pin == "auto":
        return whole_blocks(min(ram, int(free_ram_bytes * (1 - _RAM_MARGIN))), facts)
    asked = parse_bytes(config.pin)
    if config.ram is not None and asked > parse_bytes(config.ram):
        raise ConfigError(
            f"pin is {config.pin}, but ram is only {config.ram}",
            fix="page-locked memory is a part of ram: raise ram, or lower pin",
        )
    if asked > free_ram_bytes:
        raise CapacityError(
            f"pin is {config.pin}, but only {format_bytes(free_ram_bytes)} of RAM are free",
            fix="lower pin; 0 locks nothing, and experts pass through a small locked ring",
        )
    return whole_blocks(asked, facts)
