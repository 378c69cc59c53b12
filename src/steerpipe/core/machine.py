"""What this process may use of the machine: cores and memory, with the limits of its control groups. No torch.

`root` is where the file system starts; tests put a made-up one there. Files that a system does not have are no limit.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
CGROUPS = Path("sys/fs/cgroup")
UNLIMITED = 1 << 60  # control groups of version 1 write a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class Cores:
    """`quota`: CPU seconds per second that the control group grants; None without a limit."""

    online: int
    allowed: int  # by the process's affinity
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that can really run at once. A quota of 1.5 is one: a second would stand still half the time."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


@dataclass(frozen=True, slots=True)
class Memory:
    """`available_bytes`: what can be taken without swapping, within the control group's limit."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None


def read_cores(root: Path = ROOT) -> Cores:
    online = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    quotas = [quota for quota in _cpu_quotas(root) if quota > 0]
    return Cores(online, allowed, min(quotas, default=None))


def read_memory(root: Path = ROOT) -> Memory:
    meminfo = _numbers(root / "proc/meminfo", scale=1024)
    if "MemAvailable:" in meminfo:
        total, available = meminfo["MemTotal:"], meminfo["MemAvailable:"]
    else:  # not Linux: the system does not say what is available, so take what is there
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = list(_memory_limits(root))
    return Memory(
        total_bytes=total,
        available_bytes=max(0, min([available, *(limit - used for limit, used in limits)])),
        limit_bytes=min((limit for limit, _ in limits), default=None),
    )


def _own_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control group (version 2) and of those around it, the innermost first."""
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            inner = Path(line.removeprefix("0::").lstrip("/"))
            yield from (root / CGROUPS / group for group in (inner, *inner.parents))


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _own_groups(root):
        for line in _lines(group / "cpu.max"):
            share, period = line.split()
            if share != "max":
                yield int(share) / int(period)
    version_1 = root / CGROUPS / "cpu"
    for share, period in zip(
        _lines(version_1 / "cpu.cfs_quota_us"), _lines(version_1 / "cpu.cfs_period_us"), strict=False
    ):
        yield int(share) / int(period)  # negative: no limit


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each control group; file pages that the kernel would drop are not counted as used."""
    version_1 = root / CGROUPS / "memory"
    files = [(group, "memory.max", "memory.current", "inactive_file") for group in _own_groups(root)]
    files.append((version_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    for group, limit_name, used_name, droppable_name in files:
        for limit, used in zip(_lines(group / limit_name), _lines(group / used_name), strict=False):
            if limit != "max" and int(limit) < UNLIMITED:
                yield int(limit), int(used) - _numbers(group / "memory.stat").get(droppable_name, 0)


def _numbers(file: Path, scale: int = 1) -> dict[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) * scale for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
