"""The AMX guard: which machines it acts on, and that the probe really meets a trap."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steerpipe.core import amx_probe, cpu
from steerpipe.core.cpu import CURE, VARIABLE, AmxProbe, CpuGuard, apply_guard, cpu_flags, decide_guard, probe_amx

WITH_AMX = frozenset({"avx2", "avx512_bf16", "amx_bf16", "amx_tile", "amx_int8"})
WITHOUT_AMX = frozenset({"avx2", "avx512_bf16"})


def must_not_probe() -> AmxProbe:
    raise AssertionError("the answer does not depend on the probe here")


def probe_with(outcome: AmxProbe) -> Callable[[], AmxProbe]:
    return lambda: outcome


def test_a_cpu_without_amx_needs_nothing_and_pays_nothing() -> None:
    guard = decide_guard(WITHOUT_AMX, {}, must_not_probe)
    assert guard == CpuGuard(applied=False, reason="the CPU does not advertise AMX")


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_what_the_user_sets_wins(name: str) -> None:
    guard = decide_guard(WITH_AMX, {name: "AVX2"}, must_not_probe)
    assert not guard.applied
    assert guard.reason == f"{name}=AVX2 was set from outside"


def test_amx_that_works_stays_on() -> None:
    guard = decide_guard(WITH_AMX, {}, probe_with(AmxProbe.WORKS))
    assert guard == CpuGuard(applied=False, reason="AMX works here", probe=AmxProbe.WORKS)


@pytest.mark.parametrize("outcome", [each for each in AmxProbe if each is not AmxProbe.WORKS])
def test_amx_that_is_not_proved_to_work_is_kept_off(outcome: AmxProbe) -> None:
    guard = decide_guard(WITH_AMX, {}, probe_with(outcome))
    assert guard.applied
    assert guard.probe is outcome
    assert guard.reason == f"AMX {outcome.value}: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 was set"


@pytest.mark.parametrize("outcome", [AmxProbe.WORKS, AmxProbe.TRAPS])
def test_the_cure_lands_in_the_environment_only_when_applied(
    monkeypatch: pytest.MonkeyPatch, outcome: AmxProbe
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: WITH_AMX)
    monkeypatch.setattr(decide_guard, "__defaults__", (probe_with(outcome),))
    guard = apply_guard()
    assert guard.applied == (outcome is AmxProbe.TRAPS)
    assert os.environ.get(VARIABLE) == (CURE if guard.applied else None)


def test_flags_are_those_of_the_first_core(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\nflags\t\t: fpu other\n")
    assert cpu_flags(cpuinfo) == {"fpu", "amx_tile"}


@pytest.mark.parametrize("text", ["processor : 0\nFeatures : asimd bf16\n", "", None])
def test_no_flags_on_other_machines(tmp_path: Path, text: str | None) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert cpu_flags(cpuinfo) == frozenset()


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("import sys; sys.exit(0)", AmxProbe.WORKS),
        ("import sys; sys.exit(1)", AmxProbe.UNTRIED),
        (f"import sys; sys.exit({amx_probe.REFUSED})", AmxProbe.REFUSED),
        (f"import sys; sys.exit({amx_probe.WRONG})", AmxProbe.WRONG),
        (f"import sys; sys.exit({amx_probe.UNSIZED})", AmxProbe.UNSIZED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", AmxProbe.TRAPS),
    ],
)
def test_every_end_of_the_probe_has_its_meaning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, outcome: AmxProbe
) -> None:
    script = tmp_path / "probe.py"
    script.write_text(program)
    monkeypatch.setattr(amx_probe, "__file__", str(script))
    assert probe_amx() is outcome


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((0x1D, 8 << 16 | 64, 16), True),
        ((0x24, 8 << 16 | 64, 16), True),
        ((0x1C, 8 << 16 | 64, 16), False),  # the leaf is not there: another one's words
        ((0x1D, 0, 0), False),
        ((0x1D, 8 << 16 | 64, 0), False),
        ((0x1D, 7 << 16 | 64, 16), False),
    ],
)
def test_tiles_have_a_size_where_cpuid_describes_them(found: tuple[int, int, int], said: bool) -> None:
    assert amx_probe.sized(found) is said


def test_a_probe_that_hangs_or_cannot_start_counts_as_untried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(amx_probe, "__file__", str(script))
    monkeypatch.setattr(cpu, "PROBE_LIMIT_SECONDS", 0.3)
    assert probe_amx() is AmxProbe.UNTRIED
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    assert probe_amx() is AmxProbe.UNTRIED
    monkeypatch.setattr(sys, "executable", "")
    assert probe_amx() is AmxProbe.UNTRIED


def test_a_frozen_application_is_never_started_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started a process"))
    assert probe_amx() is AmxProbe.UNTRIED


on_linux_x86 = pytest.mark.skipif(not cpu_flags(), reason="x86 instructions")


@on_linux_x86
def test_the_machine_code_reads_the_last_leaf_of_cpuid() -> None:
    last, _, _ = amx_probe.ask()
    assert 0xD <= last < 0x100  # with AVX there is leaf 0xd at least


@on_linux_x86
@pytest.mark.skipif(any(flag.startswith("amx") for flag in cpu_flags()), reason="this CPU has AMX")
def test_the_real_instructions_trap_where_the_cpu_has_no_amx(tmp_path: Path) -> None:
    """Past the kernel's refusal, the machine code itself must die of SIGILL: what a lying CPU does."""
    source = Path(amx_probe.__file__).read_text()
    assert source.count("return REFUSED") == source.count("return UNSIZED") == 1
    script = tmp_path / "probe.py"
    script.write_text(source.replace("return REFUSED", "pass").replace("return UNSIZED", "pass"))
    done = subprocess.run([sys.executable, "-I", "-S", str(script)], check=False)
    assert done.returncode == -signal.SIGILL
    assert probe_amx() is AmxProbe.REFUSED


@on_linux_x86
@pytest.mark.skipif("amx_bf16" not in cpu_flags(), reason="this CPU has no AMX")
def test_a_cpu_that_advertises_amx_gets_an_answer() -> None:
    assert probe_amx() is not AmxProbe.UNTRIED


def test_importing_the_package_is_cheap_and_leaves_torch_alone() -> None:
    program = (
        "import steerpipe, sys; print('torch' in sys.modules, 'numpy' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


def test_a_bf16_product_survives_after_the_import() -> None:
    """The size that reaches AMX in oneDNN; 64x64 is too small to."""
    program = (
        "import steerpipe, torch; a = torch.ones(64, 256, dtype=torch.bfloat16); "
        "b = torch.ones(256, 256, dtype=torch.bfloat16); print((a @ b).float().unique().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"died with {done.returncode}: {done.stderr}"
    assert done.stdout.strip() == "[256.0]"
