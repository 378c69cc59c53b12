"""Nobody waits for ever: leases and readers wake each other. A hang here is a failed test, not a stuck run."""

import subprocess
import sys

import pytest

from tests.transfer.packs import tiny_pack

LEASES = """
import sys
from pathlib import Path
import torch
from steerpipe.store.reader import open_pack
from steerpipe.transfer.source import LadderSource

slots, readers = int(sys.argv[2]), int(sys.argv[3])
with LadderSource.open(open_pack(Path(sys.argv[1])), slots=slots, dtype=torch.float32, readers=readers) as source:
    for _ in range(20):
        for layer in range(3):
            with source.lease(layer, list(range(8))) as lease:
                assert sorted(e for wave in lease.waves() for e in wave.experts) == list(range(8))
    source.check_integrity()
print("done")
"""


@pytest.mark.parametrize(("slots", "readers"), [(2, 1), (5, 2), (24, 1)])
def test_leases_never_hang(slots: int, readers: int) -> None:
    command = [sys.executable, "-c", LEASES, str(tiny_pack().folder), str(slots), str(readers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr
