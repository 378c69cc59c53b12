"""What `core.resolve` wants to know about this machine and this model."""

import math
import os
from pathlib import Path

import torch

from steerpipe.core.cpu import cpu_flags
from steerpipe.core.resolve import Facts
from steerpipe.model.families import FAMILIES
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import dense_tensors, expert_tensors


def gather_facts(spec: ModelSpec) -> Facts:
    names = FAMILIES[spec.family].names
    shapes = [*dense_tensors(spec, names).values(), *expert_tensors(spec, names).values()]
    cuda = torch.cuda.is_available()
    return Facts(
        has_cuda=cuda,
        has_native_bf16=not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"}),
        core_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_ram_bytes=free_ram_bytes(),
        free_cuda_bytes=torch.cuda.mem_get_info()[0] if cuda else 0,
        stored_dtype=spec.stored_dtype,
        resident_parameters=sum(math.prod(shape) for shape in shapes),
        model_context=spec.max_context,
        kv_elements_per_token=sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers),
    )


def free_ram_bytes() -> int:
    """Memory that can be had without swapping: the kernel's estimate, within the control group's limit."""
    group = Path("/sys/fs/cgroup")
    free = [_meminfo_available(), _group_left(group / "memory.max", group / "memory.current")]
    known = [amount for amount in free if amount is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) * 1024 for words in found), None)


def _group_left(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
