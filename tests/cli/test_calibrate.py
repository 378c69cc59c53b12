"""`steerpipe calibrate` measures a model that nobody knows, and `--quality` then uses what it wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.core.quality import KL_BOUNDS


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    lines = [{"id": str(n), "text": f"{n} " + "words about all kinds of things " * 2 + str(n)} for n in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def steerpipe(*words: object) -> Any:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "160", "STEERPIPE_THREADS": "1"})


def test_a_model_is_measured_and_the_dial_turns(model: Path, texts: Path, tmp_path: Path) -> None:
    own, cache = tmp_path / "own", tmp_path / "cache"
    shutil.copytree(model, own)
    done = steerpipe("calibrate", own, texts, "--tokens", 60, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {file.name for file in (own / "predictors").iterdir()} == {"quality.json", "lookahead.safetensors"}
    assert told["tokens"] >= 27 and told["bytes"] == (own / "predictors" / "quality.json").stat().st_size
    assert all(each["loss"]["kl"] <= KL_BOUNDS[name] for name, each in told["settings"].items())
    policies = {each["policy"] for each in told["measurements"]}
    assert policies == {"surrogate", "patch", "drop", "commit", "commit-true"}
    (name, *_) = told["settings"]
    words = ("--fast-memory", "40%", "--cache-dir", cache, "--max-tokens", 6, "--ignore-eos", "--json")
    answered = steerpipe("generate", own, "-p", "Hello", *words, "--quality", name)
    assert answered.exit_code == 0, answered.output
    quality = json.loads(answered.stdout)["quality"]
    assert quality["quality"] == name and quality["uses"] > 0 and quality["expected_nats"] is not None
    shown = steerpipe("generate", own, "-p", "Hello", *words[:-1], "--quality", "surrogate")
    assert "quality surrogate: " in shown.stderr and "were substituted" in shown.stderr
    whole = steerpipe("generate", own, "-p", "Hello", *words[2:-1], "--quality", "surrogate")
    assert "quality surrogate: every expert is resident" in whole.stderr


def test_the_profile_may_lie_elsewhere(model: Path, texts: Path, tmp_path: Path) -> None:
    shown = steerpipe("calibrate", model, texts, "--tokens", 60, "--out", tmp_path / "there")
    assert shown.exit_code == 0, shown.output
    assert "KL per token in nats" in shown.stdout and f"written to {tmp_path / 'there'}" in shown.stdout
    profile = json.loads((tmp_path / "there" / "quality.json").read_text())
    (name, *_) = profile["settings"]
    words = ("--fast-memory", "40%", "--cache-dir", tmp_path, "--max-tokens", 4, "--ignore-eos", "--quality", name)
    assert steerpipe("generate", model, "-p", "Hello", *words).exit_code == 2
    told = steerpipe("generate", model, "-p", "Hello", *words, "--quality-profile", tmp_path / "there" / "quality.json")
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--residency", "1.5"), "--residency 1.5"),
        (("--tokens", "0"), "--tokens 0"),
        (("--out", "/proc/nothing"), "cannot be written to"),
    ],
)
def test_what_cannot_be_measured_is_told(model: Path, texts: Path, words: tuple[str, ...], said: str) -> None:
    done = steerpipe("calibrate", model, texts, *words)
    assert done.exit_code != 0 and said in done.stderr and "fix:" in done.stderr


def test_texts_that_are_too_short_are_told(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"text": "short"}\n')
    done = steerpipe("calibrate", model, file)
    assert done.exit_code == 2 and "tokens or more" in done.stderr


def test_three_paths_are_too_many(model: Path, texts: Path) -> None:
    done = steerpipe("calibrate", model, texts, texts)
    assert done.exit_code == 2 and "3 paths" in done.stderr
