"""Expert kernels of one row as they are compiled for a GPU: direct reads change no sum and spill nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_direct_reads_sum_in_the_same_order_load_16_bytes_and_spill_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.ahead_experts"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["pairs"], "33 pairs: every program has its own"
    assert len(lines) == 2 * 5 * 2
    for line in lines:
        plain, direct, fetched = line["reductions"]
        numbers = [each for each in fetched if "xi64" not in each]  # the others are words of progress
        assert plain == direct == numbers and plain, line["kernel"]
        assert line["stack"] == [0, 0, 0], line["kernel"]
        if line["released"]:  # at once where nothing is missing; else when all is asked for, and nothing has come
            *_, loads, stores = line["released"]
            assert len(line["released"]) == 4 and not stores, line["kernel"]
            assert loads >= line["accesses"][2]["st.global.v4.b32"], f"{line['kernel']}: weights come before"
        for loads in line["accesses"][1:]:
            assert loads["st.global.v4.b32"] >= 6, f"{line['kernel']}: what is kept is stored 16 bytes at a time"
            assert loads["ld.global.v4.b32"] >= loads["st.global.v4.b32"], f"{line['kernel']}: and loaded"
            assert loads["ld.volatile.global.b64"] == 1, f"{line['kernel']}: who waits looks again"
