"""What is wrong with the small files of a folder is told under their own names, before its weights are packed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.running import refused


def nested(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[" * 20_000)


def broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def hot(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')


def cut(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def dangling(folder: Path) -> None:
    (folder / "generation_config.json").symlink_to("../blobs/deadbeef")


@pytest.mark.parametrize("damage", [nested, broken, hot, cut, dangling])
def test_a_small_file_is_checked_before_large_ones_are_written(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("STEERPIPE_CACHE_DIR", str(cache))
    damage(folder)
    assert str(folder) in refused(folder)
    assert not cache.exists() or not any(cache.rglob("*.safetensors"))
