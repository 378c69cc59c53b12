"""`steerpipe calibrate` measures a model that nobody knows, and `--quality` then uses what it wrote."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.cli.calibrate import _advice, _texts
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import InputError
from steerpipe.core.quality import KL_BOUNDS
from steerpipe.runtime import calibrating, calibration
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality_profile import QualityProfile


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LEAST_MEASURED", 20)


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
    with safe_open(own / "predictors" / "lookahead.safetensors", "pt") as made:
        mark = json.loads(made.metadata()["steerpipe"])["model"]
    assert mark["weights"] == told["model"].partition("-")[0]
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
    advised = shlex.split(shown.stdout.splitlines()[-1])
    assert advised[:3] == ["steerpipe", "generate", str(model)] and "--quality-profile" in advised
    assert advised[advised.index("--quality") + 1] in profile["settings"]
    told = steerpipe(*advised[1:], "--max-tokens", 4)
    assert told.exit_code == 0 and "were substituted" in told.stderr, told.output


def test_where_no_position_keeps_its_bound_a_policy_is_named() -> None:
    empty = QualityProfile("me", 900, 0.25, 9.0, (), (), {})
    said = _advice(empty, None, Path("a folder"), beside=False)
    assert "no position of the dial keeps its bound" in said
    assert said.endswith("--fast-memory 25% --quality patch --quality-profile 'a folder/quality.json'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--residency", "1.5"), "--residency 1.5"),
        (("--tokens", "0"), "--tokens 0"),
        (("--out", "/proc/nothing"), "cannot be written to"),
        (("--out", "taken"), "is a folder"),
        (("--out", ""), "--out is empty"),
    ],
)
def test_what_cannot_be_measured_is_told_before_the_model_is_read(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "taken" / "quality.json").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
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
        done = steerpipe("calibrate", *named, texts, "--tokens", 60)
        assert done.exit_code == 2 and "lies in the installed package" in done.stderr and "--out" in done.stderr
    assert not (EMBEDDED / "predictors").exists()


@pytest.mark.parametrize("words", [("--tokens", "60"), ()])
def test_fewer_tokens_than_a_bound_needs_are_refused(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(calibration, "LEAST_MEASURED", 900)
    done = steerpipe("calibrate", model, texts, "--out", tmp_path / "new", *words)
    count = 1 if words else 4
    assert done.exit_code == 2 and f"{count * 33} tokens would be measured, and a bound needs 900" in done.stderr
    assert ("no --tokens" in done.stderr) == bool(words) and not (tmp_path / "new").exists()


def test_without_a_number_as_many_tokens_are_read_as_a_bound_needs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LEAST_MEASURED", 900)
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"text": f"{number:060}"}) + "\n" for number in range(60)))
    subject = calibrating.open_subject(model, EngineConfig(threads=1, cache_dir=str(tmp_path)))
    assert 900 <= calibration.measured_tokens(_texts(file, subject, None, 288)) < 940
    with pytest.raises(InputError, match="a bound needs 900"):
        _texts(file, subject, 1024, 288)
    subject.close()


def test_three_paths_are_too_many(model: Path, texts: Path) -> None:
    done = steerpipe("calibrate", model, texts, texts)
    assert done.exit_code == 2 and "3 paths" in done.stderr
