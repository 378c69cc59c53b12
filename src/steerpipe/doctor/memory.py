"""Memory, and how much of it may be locked."""

import resource
from collections.abc import Callable

from steerpipe.core.machine import Memory, read_memory
from steerpipe.core.units import format_bytes
from steerpipe.doctor.report import Fact, Finding, Level, Section

SMALL_BYTES = 2 << 30


def examine_memory(memory: Memory | None = None, lock_limit: Callable[[], int] | None = None) -> Section:
    memory = read_memory() if memory is None else memory
    limit = (lock_limit or _lock_limit)()
    facts = (
        Fact("total", memory.total_bytes, "bytes"),
        Fact("available", memory.available_bytes, "bytes", how="without swapping, within the control group's limit"),
        Fact("control group limit", memory.limit_bytes, "bytes"),
        Fact("lockable", "unlimited" if limit < 0 else limit, "" if limit < 0 else "bytes", how="RLIMIT_MEMLOCK"),
    )
    return Section("memory", facts, (_judge(memory),))


def _judge(memory: Memory) -> Finding:
    free = format_bytes(memory.available_bytes)
    if memory.available_bytes >= SMALL_BYTES:
        return Finding(Level.OK, f"{free} can be used")
    return Finding(
        Level.WARNING,
        f"only {free} can be used; torch and transformers alone take about 0.4 GiB",
        fix="end other programs, or raise the memory limit of the container",
    )


def _lock_limit() -> int:
    """Bytes; negative: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft
