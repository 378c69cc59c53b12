"""The line after an answer: its parts add up to the answer's time, and the JSON carries the link's utilisation."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.cli.answers import show_prediction, split_line
from steerpipe.core.events import Completion, FinishReason, Timings
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.tiny import write_tiny
from steerpipe.transfer.counters import LadderCounters, ReasonCounters

ANSWER = Completion("", (1, 2), FinishReason.LENGTH, Timings(3, 40.0, 2, 60.0), (5, 6, 7))


def milliseconds(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(compute|demand stall|late|disk) (\d+) ms", line)}


def test_the_parts_add_up_to_the_answers_time() -> None:
    counted = LadderCounters(
        ReasonCounters(hits=6), leased=8, misses=2, evictions=3, stall_seconds=0.025, late_seconds=0.005,
        disk_seconds=0.02, disk_bytes=4096,
    )  # fmt: skip
    line = split_line(ANSWER, counted)
    found = milliseconds(line)
    assert found == {"compute": 70, "demand stall": 25, "late": 5, "disk": 20}
    assert found["compute"] + found["demand stall"] + found["late"] == 100  # disk runs beside them
    assert "4 KiB" in line and "75% of 8 experts were there, 3 evicted" in line


def test_more_waiting_than_time_is_no_negative_compute() -> None:
    """Stall of a lease that another request of the batch asked for counts in both."""
    assert milliseconds(split_line(ANSWER, LadderCounters(stall_seconds=0.2)))["compute"] == 0


def test_no_lease_is_no_miss() -> None:
    assert "100% of 0 experts were there" in split_line(ANSWER, LadderCounters())


def test_the_json_carries_the_links_utilisation(tmp_path: Path) -> None:
    write_tiny("qwen2_moe", tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "-p", "hello", "--max-tokens", "4", "--fast-memory", "25%", "--json"]
    shown = CliRunner().invoke(app, [*words, "--no-profile"])
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)["experts"]
    assert 0 < told["utilisation"] <= 1
    assert told["utilisation"] == told["link_seconds"] / told["seconds"]
    assert told["hits"] + told["late"] + told["misses"] == told["leased"]


@pytest.mark.parametrize(
    ("device", "resident", "told"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_on_a_gpu_it_is_said_that_nothing_predicts(
    device: str, resident: bool, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = SimpleNamespace(
        prediction=None, config=SimpleNamespace(device=device), budget=SimpleNamespace(resident=resident)
    )
    show_prediction(cast(Pipeline, pipe))
    assert ("prediction: none on a GPU" in capsys.readouterr().err) == told
