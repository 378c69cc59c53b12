"""`steerpipe calibrate` measures a model that nobody knows, and `--quality` then uses what it wrote."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.core.quality import KL_BOUNDS
from steerpipe.runtime import calibrating, calibration
from steerpipe.runtime.models import EMBEDDED


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "LEAST_MEASURED", 20)
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
    words = ("--fast-memory", "40%", "--cache-dir", tmp_path, "--quality", "balanced")
    assert steerpipe("generate", model, "-p", "Hello", *words).exit_code == 2
    told = steerpipe(*shlex.split(shown.stdout.splitlines()[-1])[1:], "--max-tokens", 4)  # as it was advised
    assert told.exit_code == 0 and "were substituted" in told.stderr, told.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--residency", "1.5"), "--residency 1.5"),
        (("--tokens", "0"), "--tokens 0"),
        (("--out", "/proc/nothing"), "cannot be written to"),
        (("--out", ""), "--out is empty"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_model_is_read(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(calibrating, "open_subject", None)
    done = steerpipe("calibrate", model, texts, *words)
    assert done.exit_code != 0 and said in done.stderr and "fix:" in done.stderr


def test_texts_that_are_too_short_are_told(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"text": "short"}\n')
    done = steerpipe("calibrate", model, file)
    assert done.exit_code == 2 and "tokens or more" in done.stderr
    assert not (model / "predictors").exists()


def test_nothing_is_written_into_the_package(texts: Path) -> None:
    for named in ((), (EMBEDDED,)):
        assert "lies in the installed package" in steerpipe("calibrate", *named, texts, "--tokens", 60).stderr
    assert not (EMBEDDED / "predictors").exists()


def test_fewer_tokens_than_a_bound_needs_are_refused(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steerpipe.cli.calibrate._TOKENS", 60)
    words = ("calibrate", model, texts, "--json", "--out", tmp_path / "new")
    for least, measured, more in ((100, 33, ("--tokens", 60)), (133, 132, ())):
        monkeypatch.setattr(calibration, "LEAST_MEASURED", least)
        told = steerpipe(*words, *more).stderr
        assert f"{measured} tokens would be measured, and a bound needs {least}" in told
        assert not (tmp_path / "new").exists()
    monkeypatch.setattr(calibration, "LEAST_MEASURED", 100)
    assert json.loads(steerpipe(*words).stdout)["tokens"] == 132


def test_default_vectors_are_of_one_models_weights_and_finite(model: Path, texts: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "own")
    told = json.loads(steerpipe("calibrate", tmp_path / "own", texts, "--json").stdout)
    file = tmp_path / "own" / "predictors" / "lookahead.safetensors"
    said, tensors = json.loads(safe_open(file, "pt").metadata()["steerpipe"]), load_file(file)
    weights = said.pop("model")["weights"]
    assert weights == told["model"].partition("-")[0]
    for more, scale, wrong in (({"weights": "f00d"}, 1, "weights f00d"), ({}, float("nan"), "not finite"), ({}, 1, "")):
        now = tensors | {"vectors": tensors["vectors"] * scale}
        save_file(now, file, {"steerpipe": json.dumps(said | {"model": more})})
        for asked in ("--quality=surrogate", "--cover=2"):
            done = steerpipe("generate", tmp_path / "own", "-pHi", "--fast-memory=40%", "--predict=off", asked)
            assert wrong in done.stderr and (done.exit_code == 0) == (not wrong)


def test_three_paths_are_too_many(model: Path, texts: Path) -> None:
    done = steerpipe("calibrate", model, texts, texts)
    assert done.exit_code == 2 and "3 paths" in done.stderr
