"""Where the output cannot go, where there is no input, where the memory is not: words and a status, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    write_tiny("mixtral", folder)
    return folder


def shell(line: str, model: Path) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m steerpipe generate {model} --max-tokens 3 {line}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_told(model: Path) -> None:
    done = shell("-p x --json > /dev/full", model)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_a_closed_stdout_is_no_crash_and_a_closed_stdin_is_told(model: Path) -> None:
    quiet = shell("-p x --json >&-", model)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    deaf = shell("-p - <&-", model)
    assert deaf.returncode == 2
    assert "stdin" in deaf.stderr and "Traceback" not in deaf.stderr


def test_memory_that_is_not_there_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    monkeypatch.setattr("steerpipe.runtime.pipeline.build_weights", refuse)
    result = CliRunner().invoke(app, ["generate", str(model), "-p", "x"])
    assert result.exit_code == 1
    assert "not enough memory" in result.stderr and result.stdout == ""


def test_a_stop_token_can_be_given(model: Path) -> None:
    words = ["generate", str(model), "-p", "x", "--temperature", "0", "--ignore-eos", "--json"]
    plain = json.loads(CliRunner().invoke(app, [*words, "--max-tokens", "8"]).stdout)
    stop = plain["token_ids"][3]
    ended = json.loads(CliRunner().invoke(app, [*words, "--max-tokens", "8", "--stop-token-id", str(stop)]).stdout)
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"] == plain["token_ids"][: plain["token_ids"].index(stop) + 1]
    assert isinstance(plain["config"]["threads"], int) and plain["config"]["kv_memory_bytes"] > 0
