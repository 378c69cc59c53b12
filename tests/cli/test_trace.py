"""`steerpipe trace` from the command line."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.trace.engine import EngineTracer
from steerpipe.trace.reader import TraceReader
from tests.trace.samples import assert_same


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"p{number}", "prompt": f"Say {number} words about {number * 7}"} for number in range(5)]
    lines.append({"id": "document", "text": "It was a dark and stormy night"})  # type: ignore[dict-item]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trace(*words: object) -> Any:
    result = CliRunner().invoke(app, ["trace", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def test_a_trace_is_written_and_told_as_json(model: Path, prompts: Path, tmp_path: Path) -> None:
    result = trace(model, prompts, tmp_path / "out", "--generate", 4, "--weights", "--json", "--dtype", "float32")
    told = json.loads(result.stdout)
    reader = TraceReader(tmp_path / "out")
    assert told["prompts"] == told["finished"] == 6 and told["tokens"] == told["new_tokens"] == reader.tokens
    assert told["tokens_per_second"] > 0 and told["resumed"] == 0 and told["too_long"] == []
    assert told["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert set(reader.prompts) == {"p0", "p1", "p2", "p3", "p4", "document"}
    assert all(each.weights is not None and len(each.tokens) > each.prompt_tokens for each in reader)
    assert result.stderr == ""


def test_the_engine_of_transformers_routes_alike(model: Path, prompts: Path, tmp_path: Path) -> None:
    trace(model, prompts, tmp_path / "ours", "--dtype", "float32")
    trace(model, prompts, tmp_path / "theirs", "--engine", "transformers")
    for ours, theirs in zip(TraceReader(tmp_path / "ours"), TraceReader(tmp_path / "theirs"), strict=True):
        assert_same(ours, theirs)


def test_states_are_kept_on_request(model: Path, prompts: Path, tmp_path: Path) -> None:
    trace(model, prompts, tmp_path / "out", "--engine", "transformers", "--states", "--limit", 2)
    found = list(TraceReader(tmp_path / "out"))
    assert len(found) == 2 and all(each.states is not None for each in found)


def test_a_second_run_goes_on_and_says_so(model: Path, prompts: Path, tmp_path: Path) -> None:
    trace(model, prompts, tmp_path / "out", "--limit", 2)
    with open(tmp_path / "out" / "index.jsonl", "ab") as index:
        index.write(b'{"prompt":"p2","torn')
    result = trace(model, prompts, tmp_path / "out")
    assert "has 2 of 6 prompts already" in result.stderr and "20 bytes of an unfinished one" in result.stderr
    assert "6 prompts" in result.stderr and "per second" in result.stderr and result.stdout == ""
    assert len(TraceReader(tmp_path / "out")) == 6
    again = json.loads(trace(model, prompts, tmp_path / "out", "--json").stdout)
    assert again["resumed"] == again["finished"] == 6 and again["new_tokens"] == 0


def test_a_trace_is_replayed_as_it_is(model: Path, prompts: Path, tmp_path: Path) -> None:
    trace(model, prompts, tmp_path / "out")
    words = ["replay", str(tmp_path / "out"), "--warmup", "5", "--tokens", "60", "--residency", "0.75"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert {run["name"] for run in json.loads(result.stdout)["runs"]} >= {"lfru", "belady", "all resident"}
    refused = CliRunner().invoke(app, [*words, "--experts", "9"])
    assert refused.exit_code == 2 and "--experts with a trace" in refused.stderr


def test_an_interrupt_keeps_what_is_finished(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = EngineTracer.trace

    def stopped(self: EngineTracer, *arguments: Any) -> Iterator[Any]:
        for number, windows in enumerate(whole(self, *arguments)):
            if number == 2:
                raise KeyboardInterrupt
            yield windows

    monkeypatch.setattr(EngineTracer, "trace", stopped)
    result = CliRunner().invoke(app, ["trace", str(model), str(prompts), str(tmp_path / "out")])
    assert result.exit_code == 130 and "2 prompts are kept" in result.stderr
    assert len(TraceReader(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "vllm"], "vllm"),
        (["--states"], "hidden states"),
        (["--batch-tokens", "64"], "--batch-tokens"),
        (["--batch-tokens", "-5", "--engine", "transformers"], "--batch-tokens -5"),
        (["--limit", "0"], "--limit 0"),
        (["--generate", "-1"], "-1 tokens"),
        (["--generate", "100000"], "100000"),
        (["--window", "0"], "windows of 0"),
        (["--batch", "2"], "a batch of prompts without answers"),
        (["--batch", "0"], "a batch of 0"),
        (["--batch", "2", "--generate", "2", "--engine", "transformers"], "in batches"),
        (["--engine", "transformers", "--dtype", "int3"], "int3"),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(
    words: list[str], said: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["trace", str(model), str(prompts), str(tmp_path / "out"), *words])
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "fix:" in result.stderr and result.stdout == ""
    assert not (tmp_path / "out").exists()


def test_a_file_without_prompts_is_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "nowhere/model", str(tmp_path / "none.jsonl"), str(tmp_path / "out")])
    assert result.exit_code == 2 and "none.jsonl does not exist" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_and_started_again_leaves_the_trace_of_one_that_was_not(
    how: signal.Signals, model: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--generate", "24", "--dtype", "float32"]
    trace(model, prompts, tmp_path / "whole", *options)
    command = [sys.executable, "-m", "steerpipe", "trace", str(model), str(prompts), str(tmp_path / "out"), *options]
    draw, index = random.Random(7), tmp_path / "out" / "index.jsonl"
    for wanted in (1, 4):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not index.exists() or index.read_bytes().count(b"\n") < wanted:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
                break
        for _ in range(draw.randrange(100_000)):
            pass
        process.send_signal(how)
        _, said = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 130, 0), said
        assert len(TraceReader(tmp_path / "out")) >= wanted
    trace(model, prompts, tmp_path / "out", *options)
    for ours, theirs in zip(TraceReader(tmp_path / "out"), TraceReader(tmp_path / "whole"), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "value"), [("QUALITY", "drop"), ("COVER", "2")])
def test_a_lossy_setting_of_the_environment_is_refused(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"STEERPIPE_{name}", value)
    result = CliRunner().invoke(app, ["trace", str(model), str(prompts), str(tmp_path / "out")])
    assert result.exit_code != 0 and f"STEERPIPE_{name}" in result.output
    assert not (tmp_path / "out").exists()
