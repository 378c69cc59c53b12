"""`steerpipe serve` as people start it: its flags, its signals, its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.running import LIMIT_SECONDS

SERVE = (sys.executable, "-m", "steerpipe", "serve")


@contextmanager
def started(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed when the block ends or the time is up."""
    process = subprocess.Popen(
        [*SERVE, *arguments], env=os.environ | environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    limit = threading.Timer(LIMIT_SECONDS, process.kill)
    limit.start()
    with process:
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


def test_a_running_answer_is_finished_before_the_server_ends(model: Path) -> None:
    key = "the-only-key-there-is"
    with started(
        str(model), "--port", "0", "--dtype", "float32", "--threads", "1", "--no-profile", STEERPIPE_API_KEY=key
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"tiny-moe at (http://127\.0\.0\.1:\d+)/v1 · 1 API key · 8 answers at once, 512 tokens", line)
        assert found, line
        body = {"prompt": "until the end", "max_tokens": 300, "ignore_eos": True, "stream": True}
        client = httpx.Client(
            base_url=found[1], headers={"authorization": f"Bearer {key}"}, timeout=LIMIT_SECONDS
        )  # fmt: skip
        with client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            refused = 200
            while refused == 200:  # the signal is on its way
                refused = httpx.get(f"{found[1]}/health", timeout=LIMIT_SECONDS).status_code
            rest = [line for line in lines if line]
        assert refused == 503
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(LIMIT_SECONDS) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    with started(str(tmp_path), "--port", "0") as process:
        _, stderr = process.communicate()
    assert process.returncode == 2
    assert stderr.startswith("error: ") and "fix: " in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_an_engine_whose_server_is_killed_ends_by_itself(model: Path) -> None:
    with started(str(model), "--port", "0", "--no-profile") as process:
        assert process.stdout is not None
        process.stdout.readline()
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
        names = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
        engine = next(child for child, name in names.items() if "spawn_main" in name and "resource" not in name)
        process.kill()
        process.wait(LIMIT_SECONDS)
        while Path(f"/proc/{engine}").exists() and "Z" not in Path(f"/proc/{engine}/stat").read_text().split()[2]:
            os.sched_yield()


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_the_server(model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started(str(model), "--port", str(port), "--no-profile") as process:
        loading = 0
        while loading != 503:
            try:
                loading = httpx.get(f"http://127.0.0.1:{port}/health", timeout=LIMIT_SECONDS).status_code
            except httpx.HTTPError:
                continue
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) == 0
