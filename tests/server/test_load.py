"""64 clients for ten minutes, or for LOAD_SECONDS: no answer lost or crossed, nothing left behind, memory flat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"
SECONDS = float(os.environ.get("LOAD_SECONDS", "600"))


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
