"""Stopped by a full disk, packing goes on and ends with the same bytes; what it finds is checked before it is used."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from steerpipe.core.errors import CapacityError, PackError
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store import files, pack
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.workspace import Workspace
from tests.store.conftest import SMALL as OPTIONS
from tests.store.conftest import contents, save_tiny


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
    checkpoint: Checkpoint, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 60000)  # longer than the whole file of the other job
        with pytest.raises(CapacityError):
            write_pack(checkpoint, tmp_path / "p", PackOptions(ExpertFormat.FLOAT32))
    report = write_pack(checkpoint, tmp_path / "p", OPTIONS)
    assert report.resumed_experts == 0
    assert contents(tmp_path / "p") == whole


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
