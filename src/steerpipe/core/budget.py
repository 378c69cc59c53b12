"""How much memory the experts get, from what was asked for and what is there. Pure: no torch, no environment."""

from dataclasses import dataclass

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.pages import PagePlan
from steerpipe.core.units import format_bytes, parse_bytes

MARGIN = 0.1  # of the free memory, left for activations, slabs and the rest of the process


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The experts of one pack."""

    experts: int
    slot_bytes: int  # one, compute-ready; on a GPU, as it lies on disk
    block_bytes: int  # one, as it lies on disk


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """Where the experts lie. `resident`: all of them are loaded at the start and never leave."""

    slots: int
    ram_bytes: int  # for raw blocks behind the slots, the page-locked ones included
    pace: float | None  # bytes per second
    resident: bool
    reason: str
    pinned_bytes: int = 0  # of the RAM: page-locked, so that a GPU copies from it at the link's full rate
    ram_reason: str = "as set"
    pages: PagePlan | None = None  # which the slots lie in, where keys and values take theirs from them


def plan_budget(config: EngineConfig, facts: ExpertFacts, free_bytes: int) -> ExpertBudget:
    """Without a GPU. `free_bytes` is what dense weights and KV leave. Errors name the smallest budget that would do."""
    refuse_pin(config)
    pace = None if config.pace is None else float(parse_bytes(config.pace))
    if facts.experts == 0:
        return NO_EXPERTS
    ram = None if config.ram is None else parse_bytes(config.ram)
    if config.fast_memory == "auto" and ram is None:
        return _automatic(facts, free_bytes, pace)
    if config.fast_memory == "auto":
        assert ram is not None, "one of the two was given"
        slots = min(ram // facts.slot_bytes, facts.experts)
        return _within(slots, facts, 0, pace, f"what {format_bytes(ram)} of RAM holds", free_bytes)
    slots = min(slots_asked(config.fast_memory, facts), facts.experts)
    behind = 0 if ram is None else ram - slots * facts.slot_bytes
    if behind < 0:
        raise ConfigError(
            f"fast_memory takes {format_bytes(slots * facts.slot_bytes)}, but ram is only {format_bytes(ram or 0)}",
            fix="without a GPU the slots lie in RAM: raise ram, or lower fast_memory",
        )
    return _within(slots, facts, whole_blocks(behind, facts), pace, "as set", free_bytes)


NO_EXPERTS = ExpertBudget(0, 0, None, resident=True, reason="the model has no experts")


def refuse_pin(config: EngineConfig) -> None:
    """Raises if page-locked memory was asked for where nothing would copy from it."""
    if config.pin != "auto":
        raise ConfigError(
            f"pin is {config.pin}, but only a GPU copies from page-locked memory, and the device is cpu",
            fix="leave pin out; ram and fast_memory say how much memory the experts get",
        )


def slots_asked(fast_memory: str, facts: ExpertFacts) -> int:
    """How many experts a share or an amount of bytes is."""
    if fast_memory.endswith("%"):
        return int(facts.experts * float(fast_memory[:-1]) / 100 + 1e-9)
    return parse_bytes(fast_memory) // facts.slot_bytes


def whole_blocks(size_bytes: int, facts: ExpertFacts) -> int:
    """Bytes of the raw blocks that fit; 0 where only one does: a tier of one block would hold nothing."""
    blocks = min(size_bytes // facts.block_bytes, facts.experts)
    return blocks * facts.block_bytes if blocks >= SMALLEST_SLOTS else 0


def refuse_too_few(slots: int, facts: ExpertFacts) -> None:
    """Raises the error that names the smallest budget, if there are fewer slots than that."""
    if slots < SMALLEST_SLOTS:
        smallest = SMALLEST_SLOTS * facts.slot_bytes
        raise ConfigError(
            f"the budget holds {slots} experts of {format_bytes(facts.slot_bytes)}",
            fix=f"give at least {smallest:,} bytes ({format_bytes(smallest)}): {SMALLEST_SLOTS} experts",
        )


def refuse_too_little(room: int, free_bytes: int, facts: ExpertFacts, what: str) -> None:
    """Raises if what is free, less its margin, holds fewer than two experts."""
    if room // facts.slot_bytes < SMALLEST_SLOTS:
        raise CapacityError(
            f"{format_bytes(max(0, free_bytes))} of {what} are free; two experts take "
            f"{format_bytes(SMALLEST_SLOTS * facts.slot_bytes)}",
            fix="free memory, lower max_context or kv_memory, or use a smaller dtype",
        )


def _automatic(facts: ExpertFacts, free_bytes: int, pace: float | None) -> ExpertBudget:
    room = int(free_bytes * (1 - MARGIN))
    if facts.experts * facts.slot_bytes <= room and pace is None:
        return ExpertBudget(facts.experts, 0, None, resident=True, reason="all experts fit in memory")
    refuse_too_little(room, free_bytes, facts, "memory")
    slots = min(room // facts.slot_bytes, facts.experts)
    return _within(slots, facts, 0, pace, f"what is free less {MARGIN:.0%}", free_bytes)


def _within(
    slots: int, facts: ExpertFacts, ram_bytes: int, pace: float | None, reason: str, free_bytes: int
) -> ExpertBudget:
    refuse_too_few(slots, facts)
    if slots * facts.slot_bytes + ram_bytes > free_bytes:
        behind = f" and {format_bytes(ram_bytes)} of raw blocks behind them" if ram_bytes else ""
        raise CapacityError(
            f"{slots} experts take {format_bytes(slots * facts.slot_bytes)}{behind}, but "
            f"{format_bytes(max(0, free_bytes))} of memory are free beside dense weights and keys and values",
            fix=f"lower fast_memory or ram (at least {SMALLEST_SLOTS * facts.slot_bytes:,} bytes: two experts), "
            "kv_memory or max_context",
        )
    return ExpertBudget(slots, ram_bytes, pace, resident=False, reason=reason)
