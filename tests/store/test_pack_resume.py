"""Killed at any byte, or stopped by a full disk, packing goes on and ends with the same bytes."""

import errno
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from steerpipe.core.errors import CapacityError, PackError
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store import files, pack
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.store.verify import verify
from steerpipe.store.workspace import Workspace
from tests.store.conftest import contents, save_tiny

OPTIONS = PackOptions(ExpertFormat.INT4, DenseFormat.INT8)

# Packs once for each "name:budget", in a child that kills itself at that byte. Steps that write nothing count as a byte.
KILLER = """
import os, signal, sys
from pathlib import Path
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import PackOptions, write_pack

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


@pytest.fixture
def whole(checkpoint: Checkpoint, tmp_path: Path) -> dict[str, bytes]:
    write_pack(checkpoint, tmp_path / "whole", OPTIONS)
    return contents(tmp_path / "whole")


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
    assert write_pack(checkpoint, root / "p", OPTIONS).resumed_experts == 8
    assert contents(root / "p") == whole


def stop_after(monkeypatch: pytest.MonkeyPatch, budget: int, number: int = errno.ENOSPC) -> None:
    left = budget
    pwrite = os.pwrite

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(number, os.strerror(number))
        done = pwrite(descriptor, content[:left], offset)
        left -= done
        return done

    monkeypatch.setattr(os, "pwrite", full)


@pytest.mark.parametrize("budget", [0, 100, 5000, 12345, 30000, 39000, 52000])
def test_a_full_disk_is_a_capacity_error_and_packing_goes_on_when_there_is_room(
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, budget)
        with pytest.raises(CapacityError, match="No space left on device") as caught:
            write_pack(checkpoint, tmp_path / "p", OPTIONS)
    assert "same command again" in caught.value.fix
    assert not (tmp_path / "p").exists()
    write_pack(checkpoint, tmp_path / "p", OPTIONS)
    assert contents(tmp_path / "p") == whole


def test_another_error_of_the_disk_is_told_as_it_is(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 6000, errno.EIO)
    with pytest.raises(PackError, match="Input/output error"):
        write_pack(checkpoint, tmp_path / "p")


def test_a_file_size_limit_of_the_system_is_a_capacity_error(checkpoint: Checkpoint, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CapacityError, match="File too large"):
            write_pack(checkpoint, tmp_path / "p")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "p").exists()
    assert write_pack(checkpoint, tmp_path / "p").resumed_experts > 0


def test_room_is_checked_before_the_first_block(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    monkeypatch.setattr(pack, "_write_experts", lambda *_: pytest.fail("it began to write"))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes \(.*\), but its disk has 50,000 free \(48.8 KiB\)"):
        write_pack(checkpoint, tmp_path / "p")


def test_what_a_run_left_is_checked_before_it_is_used(
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 34000)
        with pytest.raises(CapacityError):
            write_pack(checkpoint, tmp_path / "p", OPTIONS)
    with (tmp_path / "p.partial" / "experts.safetensors").open("r+b") as file:
        file.seek(4096 + 2 * 4096 + 17)
        file.write(b"\xa5\x5a\xa5")  # inside the third block
    report = write_pack(checkpoint, tmp_path / "p", OPTIONS)
    assert report.resumed_experts == 2
    assert contents(tmp_path / "p") == whole


def test_what_another_job_left_is_not_used(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 34000)
        with pytest.raises(CapacityError):
            write_pack(checkpoint, tmp_path / "p", OPTIONS)
    report = write_pack(checkpoint, tmp_path / "p", PackOptions(ExpertFormat.INT8))
    assert report.resumed_experts == 0
    assert verify(tmp_path / "p").good


def test_a_checkpoint_that_changed_since_is_packed_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny(tmp_path / "m", "olmoe", torch.bfloat16)
    with monkeypatch.context() as patch:
        stop_after(patch, 20000)
        with pytest.raises(CapacityError):
            write_pack(source, tmp_path / "p", OPTIONS)
    weights = tmp_path / "m" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = open_checkpoint(tmp_path / "m")
    assert write_pack(changed, tmp_path / "p", OPTIONS).resumed_experts == 0


def test_a_checkpoint_that_changes_while_it_is_packed_gives_no_pack(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "m", "olmoe", torch.bfloat16)

    def touch(done: int, total: int) -> None:
        os.utime(tmp_path / "m" / "model.safetensors", ns=(done, done))

    with pytest.raises(PackError, match="changed while it was packed"):
        write_pack(source, tmp_path / "p", progress=touch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_two_processes_cannot_write_the_same_pack(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with (
        Workspace(tmp_path / "p", "job", ()) as work,
        pytest.raises(PackError, match=r"another process is writing into .*p\.partial"),
    ):
        write_pack(checkpoint, tmp_path / "p")
    assert work.folder.exists()
    write_pack(checkpoint, tmp_path / "p")


def test_a_folder_of_someone_else_is_not_taken_for_an_unfinished_pack(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "p.partial").mkdir()
    (tmp_path / "p.partial" / "diary.txt").write_text("mine")
    with pytest.raises(PackError, match=r"holds diary\.txt"):
        write_pack(checkpoint, tmp_path / "p")
    assert (tmp_path / "p.partial" / "diary.txt").read_text() == "mine"


def test_a_pack_that_appears_meanwhile_is_not_replaced(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def appear(done: int, total: int) -> None:
        (tmp_path / "p").mkdir(exist_ok=True)
        (tmp_path / "p" / "mine.txt").write_text("mine")

    with pytest.raises(PackError, match="appeared while the pack was written"):
        write_pack(checkpoint, tmp_path / "p", progress=appear)
    assert list(contents(tmp_path / "p")) == ["mine.txt"]
