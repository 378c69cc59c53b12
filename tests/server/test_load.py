"""64 clients for ten minutes, or for LOAD_SECONDS: no answer lost or crossed, nothing left behind, memory flat, and
what the scheduler takes within its bound."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_load import is_good

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
SECONDS = float(os.environ.get("LOAD_SECONDS", "600"))


GOOD: dict[str, Any] = {
    "counts": {"answers": 3}, "restarts": 0, "leaked_kv_share": 0.0, "overhead_p99_below_seconds": 0.005,
}  # fmt: skip


@pytest.mark.parametrize(
    "fault",
    [
        {"counts": {}},
        {"counts": {"answers": 3, "lost": 1}},
        {"counts": {"answers": 3, "crossed": 1}},
        {"counts": {"answers": 3, "status 500": 1}},
        {"restarts": 1},
        {"leaked_kv_share": 0.1},
        {"overhead_p99_below_seconds": 0.01},
    ],
    ids=str,
)
def test_a_run_with_one_fault_is_not_good(fault: dict[str, Any]) -> None:
    assert is_good(GOOD) and not is_good(GOOD | fault)


@pytest.mark.slow
def test_many_clients_with_cancels_slow_readers_and_drafts(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = [sys.executable, str(SCRIPT), "--clients", "64", "--seconds", str(SECONDS), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert found["counts"]["drafts answered"] > 0 and found["counts"]["drafts left"] > 0
    for process in ("server", "engine"):
        assert found["memory"][process]["growth"] < 0.02, found["memory"]
