"""Cores and memory on made-up machines."""

import os
from pathlib import Path

import pytest

from steerpipe.core.machine import Cores, read_cores, read_memory

GIB = 2**30
MEMINFO = (
    f"MemTotal:       {16 * 2**20} kB\nMemFree:        1 kB\nMemAvailable:   {8 * 2**20} kB\nHugePages_Total:  0\n"
)


def machine(root: Path, **files: str) -> Path:
    """A file system; `__` in a name is a slash and the rest is the path below the root."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def test_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert read_cores(root) == Cores(online=16, allowed=8, quota=None)
    assert read_cores(root).usable == 8
    memory = read_memory(root)
    assert (memory.total_bytes, memory.available_bytes, memory.limit_bytes) == (16 * GIB, 8 * GIB, None)


def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        **{
            "sys__fs__cgroup__outer__cpu.max": "250000 100000\n",
            "sys__fs__cgroup__outer__inner__cpu.max": "max 100000\n",
            "sys__fs__cgroup__outer__memory.max": f"{6 * GIB}\n",
            "sys__fs__cgroup__outer__memory.current": f"{3 * GIB}\n",
            "sys__fs__cgroup__outer__memory.stat": f"anon 1\ninactive_file {1 * GIB}\n",
            "sys__fs__cgroup__outer__inner__memory.max": "max\n",
            "sys__fs__cgroup__outer__inner__memory.current": "1\n",
        },
    )
    assert read_cores(root).quota == 2.5
    assert read_cores(root).usable == 2
    memory = read_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (6 * GIB, 4 * GIB)


def test_groups_of_version_1(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "50000\n",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": f"{3 * GIB}\n",
        },
    )
    assert read_cores(root).quota == 0.5
    assert read_cores(root).usable == 1
    assert read_memory(root).available_bytes == 0


def test_version_1_writes_no_limit_as_a_huge_or_negative_number(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        **{
            "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1\n",
            "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712\n",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "5\n",
        },
    )
    assert read_cores(root).quota is None
    assert read_memory(root).limit_bytes is None


def test_a_system_without_proc(tmp_path: Path) -> None:
    memory = read_memory(tmp_path)
    assert memory.total_bytes == memory.available_bytes > 0


def test_this_machine() -> None:
    assert read_cores().usable >= 1
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
