"""The dense kernels compile for a GPU: types and shapes that the interpreter lets pass do not pass there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_row_linear", "_row_gated_linear", "_gated", "_rms_norm", "_rotate_and_store", "_decode_parts", "_decode_merge",
    "_prefill", "_route", "_combine", "_count_kernel", "_place_kernel", "_look", "_foretell", "_hold",
    "_write_time", "_attend", "_feed", "_say",
}  # fmt: skip


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.ahead"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} == KERNELS
