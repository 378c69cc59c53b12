"""The line after an answer: its parts add up to the answer's time, and the JSON carries the link's utilisation."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.cli.answers import show_prediction, show_quality, split_line
from steerpipe.core.events import Completion, FinishReason, Timings
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.runtime.prediction import Prediction
from steerpipe.tiny import write_tiny
from steerpipe.transfer.counters import LadderCounters, ReasonCounters

ANSWER = Completion("", (1, 2), FinishReason.LENGTH, Timings(3, 40.0, 2, 60.0), (5, 6, 7))


def milliseconds(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(compute|misses|late guesses|disk) (\d+) ms", line)}


def test_the_parts_add_up_to_the_answers_time() -> None:
    counted = LadderCounters(
        ReasonCounters(hits=6), leased=8, misses=2, evictions=3, stall_seconds=0.025, late_seconds=0.005,
        disk_seconds=0.02, disk_bytes=4096,
    )  # fmt: skip
    line = split_line(ANSWER, counted)
    found = milliseconds(line)
    assert found == {"compute": 70, "misses": 25, "late guesses": 5, "disk": 20}
    assert found["compute"] + found["misses"] + found["late guesses"] == 100  # disk runs beside them
    assert "4 KiB" in line and "75% of 8 expert uses found in memory, 3 evictions" in line


def test_more_waiting_than_time_is_no_negative_compute() -> None:
    """Stall of a lease that another request of the batch asked for counts in both."""
    assert milliseconds(split_line(ANSWER, LadderCounters(stall_seconds=0.2)))["compute"] == 0


def test_no_lease_is_no_miss() -> None:
    assert "100% of 0 expert uses found in memory" in split_line(ANSWER, LadderCounters())


def test_the_json_carries_the_links_utilisation(tmp_path: Path) -> None:
    write_tiny("qwen2_moe", tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "-p", "hello", "--max-tokens", "4", "--fast-memory", "25%", "--json"]
    shown = CliRunner().invoke(app, [*words, "--no-profile"])
    assert shown.exit_code == 0, shown.stderr
    told = json.loads(shown.stdout)["experts"]
    assert 0 < told["utilisation"] <= 1
    assert told["utilisation"] == told["link_seconds"] / told["seconds"]
    assert told["hits"] + told["late"] + told["misses"] == told["leased"]


@pytest.mark.parametrize(("device", "pinned", "said"), [("cuda", 9, True), ("cuda", 0, False), ("cpu", 0, False)])
def test_who_asks_for_loss_on_a_gpu_hears_what_it_costs(
    device: str, pinned: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = SimpleNamespace(
        quality=SimpleNamespace(line=lambda counts: "quality fast: some"), config=SimpleNamespace(device=device),
        budget=SimpleNamespace(pinned_bytes=pinned),
    )  # fmt: skip
    show_quality(cast("Completion", SimpleNamespace(substituted=1)), cast("Pipeline", pipe), "fast")
    told = capsys.readouterr().err
    assert "quality fast: some" in told and ("exact answers are usually quicker" in told) == said


def test_what_is_predicted_and_evicted_is_said_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    made = Prediction(1.0, standing=lambda: "prediction: none, for a reason", eviction=lambda: "eviction by x: on")
    show_prediction(cast(Pipeline, SimpleNamespace(prediction=made)))
    assert capsys.readouterr().err.splitlines() == ["prediction: none, for a reason", "eviction by x: on"]
    show_prediction(cast(Pipeline, SimpleNamespace(prediction=None)))
    assert capsys.readouterr().err == ""
