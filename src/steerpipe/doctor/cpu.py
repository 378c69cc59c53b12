"""The CPU: what it has, whether AMX is a trap here, and whether rows of a product depend on each other."""

import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from steerpipe import CPU_GUARD
from steerpipe.core.cpu import CURE, VARIABLE, AmxProbe, CpuGuard, cpu_flags
from steerpipe.core.geometry import CELL_ROWS
from steerpipe.core.machine import Cores, read_cores
from steerpipe.doctor.report import Fact, Finding, Level, Section

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
SHAPES = ((192, 48), (256, 256), (2048, 768))  # input and output width: a tiny expert, the AMX trap's size, Qwen3-30B's
# The size that reaches AMX in oneDNN; 64x64 is too small to.
PRODUCT = "import steerpipe, torch; x = torch.ones(64, 256).bfloat16(); x @ torch.ones(256, 256).bfloat16()"
PRODUCT_LIMIT_SECONDS = 60.0


def start_product() -> subprocess.Popen[bytes]:
    """Begins one bf16 product in a process of its own, which may die of it. It imports torch, so begin early."""
    return subprocess.Popen(
        [sys.executable, "-c", PRODUCT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def finish_product(product: subprocess.Popen[bytes]) -> int | None:
    """The exit status, negative for a signal; None if it had to be stopped. Waits."""
    try:
        return product.wait(PRODUCT_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        product.kill()
        product.wait()
        return None


def examine_cpu(
    product_status: int | None, guard: CpuGuard = CPU_GUARD, flags: frozenset[str] | None = None
) -> Section:
    """`product_status` is what `finish_product` gave; bf16 is tried in this process only if that went well."""
    flags = cpu_flags() if flags is None else flags
    cores = read_cores()
    present = [name for name in FEATURES if name in flags]
    facts = [
        Fact("model", model_name()),
        Fact("features", " ".join(present) or "none of those we look for"),
        Fact("cores", cores.online),
        Fact("usable cores", cores.usable, how="online, allowed by affinity and granted by the control group"),
        Fact("torch threads", torch.get_num_threads()),
        Fact("AMX guard", guard.reason),
    ]
    findings = [judge_threads(cores, torch.get_num_threads()), judge_guard(guard), judge_product(product_status)]
    dtypes = (torch.float32, torch.bfloat16) if product_status == 0 else (torch.float32,)
    findings.extend(judge_rows(dtype, rows_are_independent(dtype)) for dtype in dtypes)
    return Section("cpu", tuple(facts), tuple(findings))


def rows_are_independent(dtype: torch.dtype, linear: Callable[[Tensor, Tensor], Tensor] = F.linear) -> bool:
    """Whether the bits of a row of a 16-row product are the same at every place and beside any neighbours."""
    random = torch.Generator().manual_seed(0)
    for width, out_width in SHAPES:
        weight = torch.randn(out_width, width, generator=random).to(dtype)
        row = torch.randn(width, generator=random).to(dtype)
        expected = linear(row.expand(CELL_ROWS, -1), weight)[0]
        for place in range(CELL_ROWS):
            cell = torch.randn(CELL_ROWS, width, generator=random).to(dtype)
            cell[place] = row
            if not torch.equal(linear(cell, weight)[place], expected):
                return False
    return True


def judge_rows(dtype: torch.dtype, independent: bool) -> Finding:
    name = str(dtype).removeprefix("torch.")
    if independent:
        return Finding(Level.OK, f"{name}: a row's bits do not depend on its place or its neighbours (16-row products)")
    return Finding(
        Level.WARNING,
        f"{name}: a row's bits depend on its place or its neighbours: answers may change with the batch or chunking",
        fix="use the other --dtype if its rows are independent, and report this CPU and torch version to us",
    )


def judge_threads(cores: Cores, threads: int) -> Finding:
    if threads <= cores.usable:
        return Finding(Level.OK, f"torch uses {threads} threads on {cores.usable} usable cores")
    return Finding(
        Level.WARNING,
        f"torch uses {threads} threads, but only {cores.usable} cores are usable: they will wait for each other",
        fix=f"set --threads {cores.usable} (or OMP_NUM_THREADS={cores.usable} for other programs)",
    )


def judge_guard(guard: CpuGuard) -> Finding:
    if not guard.applied:
        return Finding(Level.OK, f"AMX trap: {guard.reason}")
    level = Level.WARNING if guard.probe is AmxProbe.UNTRIED else Level.NOTE
    return Finding(
        level,
        f"AMX trap: {guard.reason}",
        fix=f"nothing for steerpipe; for other torch programs on this machine, export {VARIABLE}={CURE}",
    )


def judge_product(status: int | None) -> Finding:
    if status == 0:
        return Finding(Level.OK, "a bf16 product (64 x 256 x 256) ran to its end in a process of its own")
    if status is None:
        how = f"did not end within {PRODUCT_LIMIT_SECONDS:.0f} s"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = f"failed with exit status {status}"
    return Finding(
        Level.PROBLEM,
        f"a bf16 product {how}",
        fix=f"use --dtype float32, or try {VARIABLE}={CURE} (or AVX2) before the command",
    )


def model_name() -> str:
    """As Linux shows it, or what Python knows of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
