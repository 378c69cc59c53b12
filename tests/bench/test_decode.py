"""`bench decode` end to end: on the decoder of a CPU, and on the GPU's in Triton's interpreter. No time is asserted."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from steerpipe.bench.command import main
from steerpipe.bench.decode import run_decode
from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.results import Findings
from steerpipe.bench.shapes import make_shape
from steerpipe.cli import app
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.store.formats import ExpertFormat

SMALL: dict[str, Any] = {"shape": "tiny", "contexts": (8,), "tokens": 2, "repeats": 2, "warmup": 1, "device": "cpu"}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: make test-gpu")


def found(options: DecodeOptions, kernels: bool | None = None) -> tuple[Findings, list[str], list[int]]:
    said: list[str] = []
    kept: list[int] = []
    return run_decode(options, said.append, lambda now: kept.append(len(now.runs)), kernels=kernels), said, kept


def test_a_cpu_measures_resident_steps_and_prompts_with_floors_first() -> None:
    options = DecodeOptions(**SMALL | {"contexts": (0, 130), "batches": (1, 3), "prefill": 20})
    findings, said, kept = found(options)
    lines = [(run.test, run.context, run.batch) for run in findings.runs]
    assert lines == [("tg2", 0, 1), ("tg2", 0, 3), ("tg2 @ d130", 130, 1), ("tg2 @ d130", 130, 3), ("pp20", 0, 1)]
    assert all(run.times.count == 4 and run.floor_ms > 0 for run in findings.runs[:4])
    assert findings.runs[-1].times.count == 2
    assert [line.split(" ")[0] for line in said] == ["memory", *["floor"] * 4, *["bfloat16"] * 5]
    assert kept == [1, 2, 3, 4, 5, 5] and findings.complete
    assert all(run.hit_rate is None and run.missed_bytes == 0 for run in findings.runs)


def test_experts_count_as_they_are_computed_with_on_a_cpu() -> None:
    findings, _, _ = found(DecodeOptions(**SMALL | {"formats": (ExpertFormat.INT4,), "dtype": "float32"}))
    shape = make_shape("tiny", ExpertFormat.INT4)
    assert findings.runs[0].active.experts == 2 * 2 * shape.layout.weights * 4


@pytest.mark.parametrize("asked", [{"residencies": (50.0,)}, {"routing": "generator"}], ids=str)
def test_what_a_cpu_cannot_measure_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on a CPU only residency 100"):
        found(DecodeOptions(**SMALL | asked))


def test_a_shape_larger_than_memory_is_refused_on_a_cpu() -> None:
    with pytest.raises(CapacityError, match="mixtral takes 17") as caught:  # 174 GiB in float32
        found(DecodeOptions(**SMALL | {"shape": "mixtral"}))
    assert "nano" in caught.value.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_cuda_without_cuda_is_an_error() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        found(DecodeOptions(**SMALL | {"device": "cuda"}))


@interpreted
def test_the_gpus_path_at_every_residency_in_the_interpreter() -> None:
    short = {"tokens": 1, "repeats": 1, "prefill": 16}
    options = DecodeOptions(**SMALL | {"residencies": (100.0, 50.0, 0.0)} | short)
    findings, said, _ = found(options, kernels=True)
    runs = {(run.test, run.residency): run for run in findings.runs}
    assert list(runs) == [(test, residency) for residency in (100.0, 50.0, 0.0) for test in ("tg1 @ d8", "pp16")]
    block = make_shape("tiny", ExpertFormat.BFLOAT16).layout.block_bytes
    resident, half, none = (runs["tg1 @ d8", residency] for residency in (100.0, 50.0, 0.0))
    assert resident.hit_rate is None and resident.expert_kernels_ms is not None
    assert resident.floor == "weights read once" and resident.routing == "generator"
    assert (half.slots, none.slots) == (8, 8) and half.floor == none.floor == "on demand"
    assert (none.hit_rate, none.missed_bytes) == (0.0, 2 * 2 * block)  # every expert of both layers, in every step
    assert none.routing == "every expert a miss"
    assert [run.driver for run in findings.runs] == ["resident"] * 2 + ["leased"] * 4, "graphs need a GPU"
    assert half.hit_rate is not None and half.missed_bytes == pytest.approx((1 - half.hit_rate) * 2 * 2 * block)
    for run in (half, none):
        assert run.resident_ms is not None and run.expert_kernels_ms is not None and run.link_bytes_per_second
        copies = 1e3 * run.missed_bytes / run.link_bytes_per_second
        assert run.floor_ms == pytest.approx(max(0.0, run.resident_ms - run.expert_kernels_ms) + copies)
    assert runs["pp16", 0.0].floor_ms >= 1e3 * runs["pp16", 0.0].missed_bytes / (none.link_bytes_per_second or math.inf)
    assert findings.pinnings["bfloat16"].size_bytes == 16 * block
    assert [curve.policy for curve in findings.curves] == ["lru", "lfru", "belady"]
    assert any(line.startswith("pinned") for line in said)


@interpreted
def test_a_batch_within_a_budget_in_the_interpreter() -> None:
    short = {"tokens": 1, "repeats": 1, "warmup": 0}
    options = DecodeOptions(
        **SMALL | {"formats": (ExpertFormat.INT4,), "residencies": (50.0,), "batches": (2,)} | short
    )
    findings, _, _ = found(options, kernels=True)
    (run,) = findings.runs
    assert (run.batch, run.format) == (2, "int4")
    assert 2 <= run.experts_per_layer <= 4
    assert run.expert_bytes_per_token == run.active.experts / 2


def test_the_command_line_ends_with_the_json_that_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["bench", "decode", "--shape", "tiny", "--context", "8", "--tokens", "2", "--repeat", "1", "--warmup", "0"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--json", str(file)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("memory of the device") and "floor" in lines[1]
    told, written = json.loads(lines[-1]), json.loads(file.read_text())
    assert told == written
    assert told["schema"] == 1 and told["complete"] is True and told["machine"]["device"] == "cpu"
    assert told.keys() == {
        "schema", "benchmark", "complete", "options", "memory_bytes_per_second", "pinning", "routing_curves", "runs",
        "notes", "machine",
    }  # fmt: skip
    (run,) = told["runs"]
    assert run["driver"] == "cpu"
    assert {"test", "times", "floor_ms", "ratio", "active", "expert_bytes_per_token", "tokens_per_second"} <= run.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "gpt-5"], "not a shape"),
        (["--shape", "tiny", "--json", "/nowhere/at/all.json"], "is no folder"),
        (["--shape", "tiny", "--residency", "25", "--device", "cpu"], "residency 100"),
        (["--batch", "many"], "--batch"),
    ],
)
def test_a_bad_command_line_is_told_with_a_fix(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "decode", *words])
    assert result.exit_code == 2
    assert said in result.stderr and "fix:" in result.stderr and result.stdout == ""


def test_the_module_runs_without_the_command_lines_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    words = ["decode", "--shape", "tiny", "--context", "0", "--tokens", "1", "--repeat", "1", "--warmup", "0"]
    assert main([*words, "--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["complete"]
    assert main([*words, "--device", "cpu", "--residency", "7"]) == 2
    assert "fix:" in capsys.readouterr().err
