"""The guard against CPUs that advertise AMX and die of it.

Some virtual machines show the amx flags while the first tile instruction kills the process with SIGILL; others have the
instructions, and hide how large tiles are: then oneDNN makes tiles of no size, and dies likewise. oneDNN, which
does torch's bf16 products, believes the flags. `ONEDNN_MAX_CPU_ISA` keeps it off AMX, if it is set before the first
product. So `import steerpipe` tries AMX in a process of its own, and sets the variable unless AMX is proved to work.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from steerpipe.core import amx_probe

VARIABLE = "ONEDNN_MAX_CPU_ISA"
OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # oneDNN still reads it
CURE = "AVX512_CORE_BF16"  # the fastest level below AMX that every CPU with AMX has
PROBE_LIMIT_SECONDS = 10.0


class AmxProbe(Enum):
    """What came of one AMX product. The value completes "AMX ..."."""

    WORKS = "works here"
    TRAPS = "is advertised, but its instructions kill the process"
    WRONG = "is advertised, but its product is wrong"
    REFUSED = "is advertised, but the kernel refuses its registers"
    UNSIZED = "is advertised, but the CPU does not say how large its tiles are"
    UNTRIED = "is advertised, but could not be tried"


@dataclass(frozen=True, slots=True)
class CpuGuard:
    """What the guard did at import and why. `probe` is None where AMX was not tried."""

    applied: bool
    reason: str
    probe: AmxProbe | None = None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features that Linux shows for the first x86 core; empty elsewhere. Reads no further than that core."""
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def probe_amx() -> AmxProbe:
    """Tries AMX in a new process (20 to 60 ms). Spawned, not forked: safe whatever threads this process has."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return AmxProbe.UNTRIED  # no interpreter to run the probe with
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", amx_probe.__file__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return AmxProbe.UNTRIED
    if done.returncode < 0:
        return AmxProbe.TRAPS
    known = {
        0: AmxProbe.WORKS, amx_probe.REFUSED: AmxProbe.REFUSED, amx_probe.WRONG: AmxProbe.WRONG,
        amx_probe.UNSIZED: AmxProbe.UNSIZED,
    }  # fmt: skip
    return known.get(done.returncode, AmxProbe.UNTRIED)


def decide_guard(
    flags: frozenset[str], environ: Mapping[str, str], probe: Callable[[], AmxProbe] = probe_amx
) -> CpuGuard:
    """Whether oneDNN has to be kept off AMX. Calls `probe` only where the answer depends on it."""
    for name in (VARIABLE, OLD_VARIABLE):
        if name in environ:
            return CpuGuard(applied=False, reason=f"{name}={environ[name]} was set from outside")
    if not any(flag.startswith("amx") for flag in flags):
        return CpuGuard(applied=False, reason="the CPU does not advertise AMX")
    outcome = probe()
    if outcome is AmxProbe.WORKS:
        return CpuGuard(applied=False, reason=f"AMX {outcome.value}", probe=outcome)
    return CpuGuard(applied=True, reason=f"AMX {outcome.value}: {VARIABLE}={CURE} was set", probe=outcome)


def apply_guard() -> CpuGuard:
    """Sets the cure in this process's environment (and so its children's) where `decide_guard` says so."""
    guard = decide_guard(cpu_flags(), os.environ)
    if guard.applied:
        os.environ[VARIABLE] = CURE
    return guard
