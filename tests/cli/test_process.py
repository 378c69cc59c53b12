"""`steerpipe` as its own process: what only a process has, such as signals, pipes and encodings."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults import folders

STEERPIPE = [sys.executable, "-m", "steerpipe"]
LAST = ("--temperature", "0", "--dtype", "float32", "--threads", "1")


def start(arguments: Sequence[str | bytes], **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*STEERPIPE, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for an answer of many minutes."""
    folder = folders.build(tmp_path_factory.mktemp("endless") / "model")
    folders.edit_config(folder, max_position_embeddings=1_000_000, eos_token_id=None)
    return folder


def test_json_is_one_object_on_stdout_and_nothing_anywhere_else(model: Path) -> None:
    """As the issue has it; the encoding of a bare locale cannot show the answer's characters, and need not."""
    process = start(
        ["generate", str(model), "-p", "Hi there", *LAST, "--max-tokens", "32", "--logprobs", "5", "--json"],
        PYTHONIOENCODING="ascii", PYTHONWARNINGS="error",
    )  # fmt: skip
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, b"")
    found = json.loads(stdout)
    assert len(found["token_ids"]) == len(found["logprobs"]) == 32
    assert any(not c.isascii() for c in found["text"])


def test_arguments_that_are_not_utf8(model: Path) -> None:
    process = start(["generate", str(model), "-p", b"caf\xe9", *LAST])
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.startswith(b"error: the prompt is not UTF-8 text")


def test_control_c_in_mid_answer_ends_quietly_with_130(endless: Path) -> None:
    process = start(["generate", str(endless), "-p", "Hi", *LAST, "--ignore-eos"])
    assert process.stdout is not None
    process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == b"interrupted\n"


@pytest.mark.parametrize("options", [(), ("--json", "--max-tokens", "4")])
def test_a_reader_that_leaves_early_ends_the_answer_quietly(endless: Path, options: tuple[str, ...]) -> None:
    with start(["generate", str(endless), "-p", "Hi", *LAST, "--ignore-eos", *options]) as process:
        assert process.stdout is not None and process.stderr is not None
        if not options:
            process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait(timeout=60) == 0
        assert stderr == b""


def test_the_command_line_alone_imports_nothing_heavy() -> None:
    code = (
        "import sys, steerpipe.cli\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'tokenizers', 'safetensors', 'numpy'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""


@pytest.mark.slow
def test_doctor_reports_in_json() -> None:
    process = start(["doctor", "--json"])
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (0, b"")
    assert isinstance(json.loads(stdout), dict)
