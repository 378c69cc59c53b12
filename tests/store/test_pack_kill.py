"""Killed at any byte, packing goes on and ends with the same bytes."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store.pack import write_pack
from steerpipe.store.verify import verify
from tests.store.conftest import SMALL as OPTIONS
from tests.store.conftest import contents

# Packs once for each "name:budget", in a child that kills itself at that byte. Steps that write nothing count as one.
KILLER = """
import os, signal, sys
from pathlib import Path
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions

source, root = Path(sys.argv[1]), Path(sys.argv[2])
pwrite = os.pwrite

def spend(count):
    global left
    left -= count
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def dying_pwrite(descriptor, content, offset):
    if len(content) > left:
        pwrite(descriptor, content[:left], offset)
    spend(len(content))
    return pwrite(descriptor, content, offset)

def counted(function):
    def call(*args, **kwargs):
        spend(1)
        return function(*args, **kwargs)
    return call

for name, _, budget in (argument.partition(":") for argument in sys.argv[3:]):
    child = os.fork()
    if child == 0:
        left = int(budget)
        os.pwrite = dying_pwrite
        for step in ("fsync", "ftruncate", "rename", "unlink"):
            setattr(os, step, counted(getattr(os, step)))
        write_pack(open_checkpoint(source), root / name, PackOptions(ExpertFormat.INT4, DenseFormat.INT8))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def kill_at(source: Path, root: Path, runs: list[tuple[str, int]]) -> list[int]:
    """Runs (name of the pack, bytes until death) one after the other. Exit codes of the children: -9 for killed."""
    command = [sys.executable, "-c", KILLER, str(source), str(root), *(f"{name}:{budget}" for name, budget in runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def budget_of_a_whole_run(checkpoint: Checkpoint, tmp_path: Path) -> int:
    """Bytes and steps of a run that is not killed, found by counting in this process."""
    counted = 0
    originals = {name: getattr(os, name) for name in ("pwrite", "fsync", "ftruncate", "rename", "unlink")}

    def count(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal counted
            counted += len(args[1]) if name == "pwrite" else 1  # type: ignore[arg-type]
            return originals[name](*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(os, name, count(name))
        write_pack(checkpoint, tmp_path / "counted", OPTIONS)
    return counted


def test_a_pack_killed_at_any_byte_resumes_to_the_same_bytes(
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    root = tmp_path / "killed"
    written = budget_of_a_whole_run(checkpoint, tmp_path)
    seeded = random.Random(3)
    budgets = [0, 1, 40, 4096, 4130, 8300, *sorted(seeded.randrange(written) for _ in range(20))]
    runs = [(str(index), budget) for index, budget in enumerate(budgets)]
    assert kill_at(checkpoint.folder, root, runs) == [-9] * len(budgets)
    resumed = []
    for index in range(len(budgets)):
        assert not (root / str(index)).exists()
        resumed.append(write_pack(checkpoint, root / str(index), OPTIONS).resumed_experts)
        assert contents(root / str(index)) == whole
    assert resumed[0] == 0
    assert len(set(resumed)) > 4  # different blocks were cut
    assert max(resumed) == 8
    assert not list(root.glob("*.partial"))


def test_every_step_of_the_end_can_be_the_last_one(
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Kills before each fsync, the rename and what follows: the name stands for a whole pack, or for nothing."""
    root = tmp_path / "killed"
    budget = budget_of_a_whole_run(checkpoint, tmp_path)
    budgets = list(range(budget - 5, budget + 1))
    codes = kill_at(checkpoint.folder, root, [(str(index), budget) for index, budget in enumerate(budgets)])
    assert codes == [-9] * 5 + [0]
    named = [(root / str(index)).exists() for index in range(len(budgets))]
    assert named == sorted(named)
    for index in range(len(budgets)):
        if named[index]:
            assert verify(root / str(index)).good
        write_pack(checkpoint, root / str(index), OPTIONS)
        assert contents(root / str(index)) == whole


def test_killed_again_and_again_it_still_ends_well(
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    root = tmp_path / "killed"
    assert kill_at(checkpoint.folder, root, [("p", 9000), ("p", 15000), ("p", 9000), ("p", 20000)]) == [-9] * 4
    assert write_pack(checkpoint, root / "p", OPTIONS).resumed_experts > 3  # no single run came further than three
    assert contents(root / "p") == whole
