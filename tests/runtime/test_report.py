"""The report has everything that helps, and nothing of what was said."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from steerpipe import Pipeline
from steerpipe.core.config import load_config
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.events import Completion
from steerpipe.runtime.report import report_run, write_report
from steerpipe.transfer.trace_file import read_recording

SECRET = "My sister Wilhelmina lives at 17 Elderberry Lane"
SETTINGS = {"fast_memory": "25%", "dtype": "float32", "threads": 1, "profile": False}


@dataclass(frozen=True)
class Reported:
    parts: dict[str, bytes]
    said: Completion  # what was really asked and answered


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    file = tmp_path_factory.mktemp("report") / "report.zip"
    generate, said = Pipeline.generate, []

    def listening(*given: Any, **settings: Any) -> Completion:
        said.append(generate(*given, **settings))
        return said[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "generate", listening)
        run = report_run(None, load_config(SETTINGS, environ={}), SECRET, max_tokens=12)
    write_report(file, {"worst": "ok", "cache": f"{Path.home()}/.cache"}, run)
    with zipfile.ZipFile(file) as archive:
        return Reported({name: archive.read(name) for name in archive.namelist()}, said[0])


@pytest.fixture
def parts(reported: Reported) -> dict[str, bytes]:
    return reported.parts


def test_everything_that_helps_is_in_it(parts: dict[str, bytes]) -> None:
    assert set(parts) == {"report.json", "timeline.json", "routing.safetensors"}
    report = json.loads(parts["report.json"])
    assert report["doctor"] == {"worst": "ok", "cache": "~/.cache"} and report["left_out"] == {}
    run = report["run"]
    assert run["config"]["dtype"] == "float32" and run["model"] == "nano" and "error" not in run
    assert run["counters"]["leased"] > 0 and run["timings"]["predicted_n"] == 12
    assert any(event["ph"] == "X" for event in json.loads(parts["timeline.json"])["traceEvents"])


def test_the_trace_is_the_run_and_can_be_replayed(parts: dict[str, bytes], tmp_path: Path) -> None:
    file = tmp_path / "routing.safetensors"
    file.write_bytes(parts["routing.safetensors"])
    recording = read_recording(file, experts=60)
    assert (recording.tokens, recording.layers, recording.top_k) == (11, 24, 4)  # the last token is never computed


def test_no_text_and_no_token_of_the_prompt_or_the_answer_is_in_it(reported: Reported) -> None:
    parts, said = reported.parts, reported.said
    text = b" ".join(parts.values()).decode("latin-1")
    assert said.text.strip() and said.text.strip() not in text
    assert not [word for word in SECRET.split() if len(word) > 3 and word in text]
    assert set(load(parts["routing.safetensors"])) == {"routing", "sequence"}
    lists = list(_lists([json.loads(parts["report.json"]), json.loads(parts["timeline.json"])]))
    for ids in (said.prompt_token_ids, said.token_ids):
        assert len(ids) > 4 and list(ids) not in lists


def _lists(value: Any) -> Iterator[list[Any]]:
    """Every list in a JSON value."""
    if isinstance(value, list):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _lists(inner)


def test_a_model_that_cannot_be_loaded_is_reported_too(tmp_path: Path) -> None:
    run = report_run(str(tmp_path / "nowhere"), load_config(SETTINGS, environ={}), SECRET, max_tokens=2)
    assert run.facts["error"]["what"] and run.routing is None
    names = write_report(tmp_path / "report.zip", {}, run)
    assert names == ["report.json"]
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert set(json.loads(archive.read("report.json"))["left_out"]) == {"timeline.json", "routing.safetensors"}


def test_an_unexpected_failure_is_told_by_its_place_not_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(Pipeline, "generate", fail)
    run = report_run(None, load_config(SETTINGS, environ={}), SECRET, max_tokens=2)
    assert run.facts["error"]["kind"] == "ValueError" and run.facts["error"]["where"]
    assert "Wilhelmina" not in json.dumps(run.facts, default=str)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    run = report_run(str(tmp_path / "nowhere"), load_config(SETTINGS, environ={}), SECRET, max_tokens=2)
    with pytest.raises(CapacityError, match="cannot be written"):
        write_report(tmp_path / "no" / "folder" / "report.zip", {}, run)


def test_wide_layers_keep_their_numbers(tmp_path: Path) -> None:
    run = report_run(str(tmp_path / "nowhere"), load_config(SETTINGS, environ={}), "a", max_tokens=2)
    wide = type(run)(run.facts, run.timeline, np.array([[[300, 2]]]))
    write_report(tmp_path / "report.zip", {}, wide)
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert load(archive.read("routing.safetensors"))["routing"].tolist() == [[[300, 2]]]


@pytest.mark.parametrize("lossy", [{"quality": "drop"}, {"cover": "auto"}], ids=str)
def test_a_lossy_run_is_refused(lossy: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="a report is of exact answers"):
        report_run(None, load_config(SETTINGS | lossy, environ={}), SECRET, max_tokens=1)
