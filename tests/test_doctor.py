"""The doctor: every judgement can go both ways, and the whole report holds together."""

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from steerpipe.core.cpu import AmxProbe, CpuGuard
from steerpipe.core.machine import Cores, Memory
from steerpipe.doctor import (
    DoctorReport,
    Fact,
    Finding,
    Level,
    Section,
    cpu,
    disk,
    gpu,
    memory,
    render,
    run_doctor,
    versions,
)

GIB = 2**30


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> DoctorReport:
    return run_doctor(tmp_path_factory.mktemp("disk"))


def test_the_report_is_whole_and_becomes_json(report: DoctorReport) -> None:
    assert [section.name for section in report.sections] == ["software", "cpu", "memory", "gpu", "disk"]
    told = json.loads(json.dumps(report.as_json()))
    assert told["worst"] in list(Level)
    findings = [finding for section in told["sections"] for finding in section["findings"]]
    assert all(finding["fix"] for finding in findings if finding["level"] != "ok")
    assert all(section["findings"] for section in told["sections"])


def test_measured_figures_say_how(report: DoctorReport) -> None:
    measured = [fact for section in report.sections for fact in section.facts if fact.unit == "GB/s"]
    assert measured
    assert all(fact.how and isinstance(fact.value, float) and fact.value > 0 for fact in measured)


def test_this_machine_multiplies_bf16_and_its_rows_are_independent(report: DoctorReport) -> None:
    found = " ".join(finding.what for finding in report.sections[1].findings if finding.level is Level.OK)
    assert "ran to its end" in found
    assert "float32: a row's bits do not depend" in found
    assert "bfloat16: a row's bits do not depend" in found


def test_rendering_shows_every_finding_and_its_fix() -> None:
    section = Section(
        "cpu",
        (Fact("ram", 3 * GIB, "bytes"), Fact("link", 12.5, "GB/s", how="by hand"), Fact("device", None)),
        (Finding(Level.OK, "fine"), Finding(Level.PROBLEM, "it [burns]", fix="call for help")),
    )
    console = Console(width=100, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(render(DoctorReport((section,), took_seconds=1.23)))
    console.file.close()
    text = console.export_text()
    for piece in (
        "3 GiB",
        "12.5 GB/s",
        "by hand",
        "none",
        "it [burns]",
        "fix: call for help",
        "1 ok, 1 problem",
        "1.2 s",
    ):
        assert piece in text


def test_what_is_too_long_for_a_line_stays_under_its_beginning() -> None:
    finding = Finding(Level.WARNING, "what is wrong " * 12, fix="what to do " * 12)
    console = Console(width=60, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(render(DoctorReport((Section("cpu", (), (finding,)),), took_seconds=0.0)))
    console.file.close()
    first, *rest = [line.rstrip() for line in console.export_text().splitlines() if "what" in line]
    assert first.startswith("  warning what is wrong")
    assert len(rest) >= 5
    assert all(line.startswith(" " * 10) and line[10] != " " for line in rest)


def test_a_finding_without_a_fix_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="no fix"):
        Finding(Level.NOTE, "something is odd")


def test_worst_is_the_gravest() -> None:
    findings = tuple(Finding(level, "what", fix="fix") for level in (Level.NOTE, Level.WARNING, Level.OK))
    assert DoctorReport((Section("cpu", (), findings),), 0.0).worst is Level.WARNING


# software


def test_least_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for package, least in versions.LEAST.items():
        assert f"{package}>={least}" in project["dependencies"]


@pytest.mark.parametrize(
    ("version", "what"), [("2.9.1", "torch 2.9.1 is older than 2.11"), ("2.11.0+cu130", None), ("3.0.0.dev1", None)]
)
def test_an_old_torch_is_a_problem(version: str, what: str | None) -> None:
    section = versions.examine_versions(lambda package: version if package == "torch" else "99.0")
    problems = [finding for finding in section.findings if finding.level is Level.PROBLEM]
    assert [finding.what for finding in problems] == ([what] if what else [])
    assert all("torch>=2.11" in finding.fix for finding in problems)


def test_a_missing_package_is_a_problem() -> None:
    def installed(package: str) -> str:
        if package == "tokenizers":
            raise metadata.PackageNotFoundError(package)
        return "99.0"

    section = versions.examine_versions(installed)
    assert [finding.what for finding in section.findings] == ["tokenizers is missing"]


# cpu


def test_rows_that_lean_on_their_neighbours_are_found() -> None:
    def leaning(cell: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(cell + 1e-3 * cell.mean(0), weight)

    def placed(cell: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = F.linear(cell, weight)
        product[15] = torch.nextafter(product[15], product[15] + 1)
        return product

    assert cpu.rows_are_independent(torch.float32)
    assert not cpu.rows_are_independent(torch.float32, leaning)
    assert not cpu.rows_are_independent(torch.float32, placed)
    assert cpu.judge_rows(torch.bfloat16, False).level is Level.WARNING


@pytest.mark.parametrize(
    ("guard", "level"),
    [
        (CpuGuard(applied=False, reason="the CPU does not advertise AMX"), Level.OK),
        (CpuGuard(applied=False, reason="AMX works here", probe=AmxProbe.WORKS), Level.OK),
        (CpuGuard(applied=True, reason="AMX traps", probe=AmxProbe.TRAPS), Level.NOTE),
        (CpuGuard(applied=True, reason="AMX could not be tried", probe=AmxProbe.UNTRIED), Level.WARNING),
    ],
)
def test_the_amx_verdict(guard: CpuGuard, level: Level) -> None:
    finding = cpu.judge_guard(guard)
    assert finding.level is level
    assert guard.reason in finding.what
    assert ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in finding.fix) == guard.applied


@pytest.mark.parametrize(
    ("status", "words"),
    [(-signal.SIGILL, "was killed by SIGILL"), (1, "failed with exit status 1"), (None, "did not end within 60 s")],
)
def test_a_product_that_dies_is_a_problem_and_bf16_is_not_tried_here(status: int | None, words: str) -> None:
    section = cpu.examine_cpu(status)
    assert any(words in finding.what and finding.level is Level.PROBLEM for finding in section.findings)
    assert not any(finding.what.startswith("bfloat16") for finding in section.findings)


def test_the_product_is_stopped_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PRODUCT_LIMIT_SECONDS", 0.1)
    product = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    assert cpu.finish_product(product) is None
    assert product.returncode == -signal.SIGKILL


def test_too_many_threads_are_told() -> None:
    assert cpu.judge_threads(Cores(8, 8, None), 8).level is Level.OK
    finding = cpu.judge_threads(Cores(8, 8, quota=2.0), 8)
    assert finding.level is Level.WARNING
    assert "--threads 2" in finding.fix


# memory


def test_memory() -> None:
    plenty = memory.examine_memory(Memory(8 * GIB, 4 * GIB, None), lambda: -1)
    assert plenty.findings[0].level is Level.OK
    assert plenty.facts[-1].value == "unlimited"
    scarce = memory.examine_memory(Memory(8 * GIB, GIB, 2 * GIB), lambda: 65536)
    assert scarce.findings[0].level is Level.WARNING
    assert scarce.facts[-1].value == 65536


# gpu


@pytest.mark.parametrize(
    ("built_for", "has_device_file", "level"),
    [
        (None, False, Level.OK),
        ("13.0", False, Level.OK),
        (None, True, Level.WARNING),
        ("13.0", True, Level.WARNING),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(built_for: str | None, has_device_file: bool, level: Level) -> None:
    assert gpu.judge_absence(built_for, has_device_file).level is level


def test_a_slow_link_is_told() -> None:
    assert gpu.judge_link(25.0).level is Level.OK
    assert gpu.judge_link(3.2).level is Level.NOTE


@pytest.mark.gpu
def test_the_link_is_measured() -> None:
    section = gpu.examine_gpu()
    rates = {fact.name: fact.value for fact in section.facts if fact.unit == "GB/s"}
    assert rates.keys() == {"pinned copy", "pageable copy"}
    assert all(isinstance(rate, float) and 0.5 < rate < 1000 for rate in rates.values())


# disk


def test_the_disk_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    rate = disk.measure_read(tmp_path)
    assert rate.gb_per_second > 0
    assert ("direct" in rate.how) == rate.direct
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_direct_reads_is_read_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        pytest.skip("this system has no direct reads")
    real_open = os.open

    def refusing_open(path: str, flags: int, *rest: int) -> int:
        if flags & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing_open)
    rate = disk.measure_read(tmp_path)
    assert not rate.direct
    assert "buffered" in rate.how
    assert disk.judge_rate(rate).level is Level.NOTE


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> disk.ReadRate:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk, "measure_read", refuse)
    section = disk.examine_disk(tmp_path / "not" / "there" / "yet")
    assert Fact("measured folder", str(tmp_path)) in section.facts
    assert section.findings[-1].level is Level.WARNING
    assert "Permission denied" in section.findings[-1].what


def test_the_disk_that_experts_are_read_from_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    def measure(folder: Path) -> disk.ReadRate:
        measured.append(folder)
        return disk.ReadRate(3.0, True, "")

    monkeypatch.setattr(disk, "measure_read", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "steerpipe").mkdir(parents=True)
    assert Fact("measured folder", str(tmp_path / "user" / "steerpipe")) in disk.examine_disk().facts
    (tmp_path / "set").mkdir()
    monkeypatch.setenv("STEERPIPE_CACHE_DIR", str(tmp_path / "set"))
    disk.examine_disk()
    assert measured == [tmp_path / "user" / "steerpipe", tmp_path / "set"]
    assert "STEERPIPE_CACHE_DIR" in disk.judge_space(0).fix


def test_space_and_speed_are_judged() -> None:
    assert disk.judge_space(100 * GIB).level is Level.OK
    assert disk.judge_space(GIB).level is Level.WARNING
    assert disk.judge_rate(disk.ReadRate(3.0, True, "")).level is Level.OK
    assert disk.judge_rate(disk.ReadRate(0.1, True, "")).level is Level.NOTE
