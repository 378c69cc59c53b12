"""A checkpoint is packed once, whoever asks, and again when it changed."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from steerpipe.core.errors import CapacityError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store import cache, files
from steerpipe.store.cache import packed
from steerpipe.store.pack import write_pack
from steerpipe.store.reader import open_pack
from steerpipe.store.verify import verify
from tests.store.conftest import contents, save_tiny


@pytest.fixture
def source(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    shutil.copytree(checkpoint.folder, tmp_path / "source")
    return tmp_path / "source"


def test_a_folder_is_packed_losslessly_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packed(source, tmp_path / "cache")
    assert first.parent == tmp_path / "cache" / "packs"
    assert first.name.startswith("source-")
    assert open_pack(first).manifest.lossless
    monkeypatch.setattr(cache, "write_pack", lambda *_: pytest.fail("it was packed again"))
    assert packed(source, tmp_path / "cache") == first


def test_a_pack_is_its_own_cache(checkpoint: Checkpoint, tmp_path: Path) -> None:
    write_pack(checkpoint, tmp_path / "p")
    assert packed(tmp_path / "p", tmp_path / "cache") == tmp_path / "p"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_gives_a_new_pack(source: Path, tmp_path: Path, name: str) -> None:
    first = packed(source, tmp_path / "cache")
    stat = (source / name).stat()
    os.utime(source / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # same size, another time
    second = packed(source, tmp_path / "cache")
    assert second != first
    assert contents(second) == contents(first)


def test_other_weights_in_the_same_folder_give_their_own_pack(source: Path, tmp_path: Path) -> None:
    first = open_pack(packed(source, tmp_path / "cache"))
    shutil.rmtree(source)
    save_tiny(source, "qwen2_moe", torch.bfloat16, seed=5)
    second = open_pack(packed(source, tmp_path / "cache"))
    assert not torch.equal(first.read_block(0, 0), second.read_block(0, 0))


def test_a_snapshot_of_the_hub_is_known_by_its_revision(source: Path, tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--ann--tiny" / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(source, snapshot)
    first = packed(snapshot, tmp_path / "cache")
    assert first.name == "ann--tiny-0123456789abcdef-v1"
    os.utime(snapshot / "config.json", ns=(1, 1))  # downloaded again
    assert packed(snapshot, tmp_path / "cache") == first


def test_many_at_once_get_one_whole_pack(source: Path, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(packed(source, tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert verify(found[0]).good
    assert not list((tmp_path / "cache" / "packs").glob("*.partial"))


def test_too_little_room_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CapacityError, match=r"needs [\d,]+ bytes .* 10 free") as caught:
        packed(source, tmp_path / "cache")
    assert "another cache directory" in caught.value.fix
    assert "--experts int4" in caught.value.fix
    assert not [path for path in (tmp_path / "cache" / "packs").iterdir() if path.suffix not in (".lock", ".partial")]
