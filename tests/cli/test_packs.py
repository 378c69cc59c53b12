"""`steerpipe pack`, `verify` and `unpack` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.tiny import write_tiny


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(folder: Path) -> dict[str, Any]:
    words = ("generate", folder, "-p", "hello", "--temperature", "0", "--max-tokens", "12", "--logprobs", "0", "--json")
    result = run(*words)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen2_moe"
    write_tiny("qwen2_moe", folder)
    return folder


def test_a_checkpoint_its_pack_and_the_pack_unpacked_answer_alike(checkpoint: Path, tmp_path: Path) -> None:
    packed, unpacked = tmp_path / "pack", tmp_path / "folder"
    assert run("pack", checkpoint, packed).exit_code == 0
    assert run("unpack", packed, unpacked).exit_code == 0
    first = answer(checkpoint)
    for other in (packed, unpacked):
        again = answer(other)
        assert (again["token_ids"], again["logprobs"]) == (first["token_ids"], first["logprobs"])


def test_pack_tells_what_it_made(checkpoint: Path, tmp_path: Path) -> None:
    result = run("pack", checkpoint, tmp_path / "p", "--experts", "int4", "--dense", "int8", "--json")
    report = json.loads(result.stdout)
    assert (report["expert_format"], report["dense_format"], report["experts"]) == ("int4", "int8", 24)
    assert 0.01 < report["loss"]["relative_rms"]["gate"] < 0.2
    shown = run("pack", checkpoint, tmp_path / "q", "--experts", "int8")
    assert "24 experts" in shown.stdout and "int8" in shown.stdout and "written" in shown.stdout


def test_verify_tells_a_good_pack_from_a_damaged_one(checkpoint: Path, tmp_path: Path) -> None:
    assert run("pack", checkpoint, tmp_path / "p").exit_code == 0
    good = run("verify", tmp_path / "p")
    assert good.exit_code == 0 and "good" in good.stdout
    experts = tmp_path / "p" / "experts.safetensors"
    content = bytearray(experts.read_bytes())
    content[-5000] ^= 1
    experts.write_bytes(content)
    bad = run("verify", tmp_path / "p", "--json")
    assert bad.exit_code == 1
    assert len(json.loads(bad.stdout)["problems"]) == 1
    refused = run("generate", tmp_path / "p", "-p", "x")
    assert refused.exit_code == 2 and "checksum" in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pack", "{model}", "{out}", "--experts", "int3"), "int3"),
        (("pack", "{model}", "{out}", "--dense", "int4"), "int4"),
        (("pack", "{model}", "{out}", "--experts", "int4", "--group", "7"), "7"),
        (("pack", "{model}", "{out}", "--order", "{out}/nothing"), "does not exist"),
        (("verify", "{model}"), "steerpipe.json"),
        (("unpack", "{model}", "{out}"), "steerpipe.json"),
    ],
)
def test_what_cannot_be_done_is_told_with_a_fix(
    words: tuple[str, ...], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    result = run(*(word.format(model=checkpoint, out=tmp_path / "out") for word in words))
    assert result.exit_code == 2
    assert said in result.stderr and "fix:" in result.stderr
    assert result.stdout == "" and not (tmp_path / "out").exists()


def test_doctor_shows_its_findings() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "a row's bits" in result.stdout
