"""`steerpipe` as its own process: what only a process has, such as signals, pipes and encodings."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import folders

STEERPIPE = (sys.executable, "-m", "steerpipe")
# A shell that starts something in the background (nohup … &) has it ignore Ctrl-C, and so all of its children.
_HEARING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("steerpipe", run_name="__main__", alter_sys=True)
"""
WITH_CONTROL_C = (sys.executable, "-c", _HEARING)
LAST = ("--temperature", "0", "--dtype", "float32", "--threads", "1")


@contextmanager
def started(
    arguments: Sequence[str | bytes], *, launch: Sequence[str] = STEERPIPE, limit_seconds: float = 60, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed when the block ends or the time is up, whatever it or the test waits for."""
    process = subprocess.Popen(
        [*launch, *arguments],
        env=os.environ | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    limit = threading.Timer(limit_seconds, process.kill)
    limit.start()
    with process:  # closes its pipes and waits
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def run(arguments: Sequence[str | bytes], *, limit_seconds: float = 60, **environ: str) -> tuple[int, bytes, bytes]:
    """Exit status, stdout, stderr."""
    with started(arguments, limit_seconds=limit_seconds, **environ) as process:
        stdout, stderr = process.communicate()
        return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Room for an answer of many minutes."""
    folder = folders.build(tmp_path_factory.mktemp("endless") / "model")
    folders.edit_config(folder, max_position_embeddings=1_000_000, eos_token_id=None)
    return folder


def test_json_is_one_object_on_stdout_and_nothing_anywhere_else(model: Path) -> None:
    """As the issue has it; the encoding of a bare locale cannot show the answer's characters, and need not."""
    status, stdout, stderr = run(
        ["generate", str(model), "-p", "Hi there", *LAST, "--max-tokens", "32", "--logprobs", "5", "--json"],
        PYTHONIOENCODING="ascii", PYTHONWARNINGS="error",
    )  # fmt: skip
    assert (status, stderr) == (0, b"")
    found = json.loads(stdout)
    assert len(found["token_ids"]) == len(found["logprobs"]) == 32
    assert any(not c.isascii() for c in found["text"])


def test_arguments_that_are_not_utf8(model: Path) -> None:
    status, stdout, stderr = run(["generate", str(model), "-p", b"caf\xe9", *LAST])
    assert (status, stdout) == (2, b"")
    assert stderr.startswith(b"error: the prompt is not UTF-8 text")


@pytest.fixture(params=["heard", "ignored"])
def inherited_control_c(request: pytest.FixtureRequest) -> Iterator[None]:
    """How this process, and so what it starts, takes SIGINT."""
    how = signal.default_int_handler if request.param == "heard" else signal.SIG_IGN
    before = signal.signal(signal.SIGINT, how)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("inherited_control_c")
def test_control_c_in_mid_answer_ends_quietly_with_130(endless: Path) -> None:
    with started(["generate", str(endless), "-p", "Hi", *LAST, "--ignore-eos"], launch=WITH_CONTROL_C) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "the answer has not begun"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
        assert process.returncode == 130
        assert stderr == b"interrupted\n"


@pytest.mark.parametrize("options", [(), ("--json", "--max-tokens", "4")])
def test_a_reader_that_leaves_early_ends_the_answer_quietly(endless: Path, options: tuple[str, ...]) -> None:
    with started(["generate", str(endless), "-p", "Hi", *LAST, "--ignore-eos", *options]) as process:
        assert process.stdout is not None and process.stderr is not None
        if not options:
            process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait() == 0
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
    status, stdout, stderr = run(["doctor", "--json"], limit_seconds=300)
    assert (status, stderr) == (0, b"")
    assert isinstance(json.loads(stdout), dict)
