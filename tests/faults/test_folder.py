"""What a person may name instead of a good checkpoint folder."""

import os
import pickle
from pathlib import Path

import pytest

from tests.faults import folders
from tests.faults.running import generate, refused


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.target,)  # type: ignore[return-value]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    message = refused(tmp_path / "gone")
    assert f"{tmp_path / 'gone'} is neither a folder nor a hub name" in message
    assert "give a folder that exists, or a name such as owner/model" in message


@pytest.mark.parametrize(
    "name", ["", "x" * 5000, "~nobody-here/model", "a b/c", "owner/model@", "_/_", "a/b/c", "..x/y"]
)
def test_a_name_that_is_neither(name: str) -> None:
    assert "is neither a folder nor a hub name" in refused(name)


@pytest.mark.parametrize(
    "name", ["owner/na--me..", "owner/a..b", "owner/a--b", "owner/-name", "owner/name.git", "o-/n"]
)
def test_a_name_that_the_hub_does_not_allow_is_told_as_such(name: str) -> None:
    message = refused(name)
    assert f"there is no folder {name} here, and the hub has no such names: " in message
    assert "owner/name as the model's page on the hub has it" in message
    assert "network" not in message


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    message = refused(folder / "model.safetensors")
    assert f"{folder / 'model.safetensors'} is a file" in message
    assert "give the folder that holds config.json and the weights" in message


def test_an_empty_folder(tmp_path: Path) -> None:
    message = refused(tmp_path)
    assert f"{tmp_path} has no config.json" in message
    assert "give the folder of a Hugging Face checkpoint" in message


def test_a_config_that_links_into_a_deleted_cache(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../blobs/deadbeef")
    assert "config.json is a link to ../blobs/deadbeef, which is not there" in refused(folder)


def test_weights_that_link_into_a_deleted_cache(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")
    assert f"model.safetensors is a link to {folder / 'gone'}, which is not there" in refused(folder)


def test_a_link_that_leads_somewhere_is_as_good_as_a_file(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert generate(folder).exit_code == 0


def test_a_folder_in_the_place_of_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read: Is a directory" in refused(folder)


def test_a_config_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, *rest: object, **named: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", forbidden)  # root may read everything, so the mode bits would not do
    message = refused(folder)
    assert "config.json cannot be read: Permission denied" in message
    assert "check that it is a file and its permissions" in message


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    message = refused(folder)
    assert f"{folder} has neither model.safetensors nor model.safetensors.index.json" in message
    assert "give a complete checkpoint folder" in message


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pt", "m.pth"]
)
def test_a_pickle_is_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    """The pickle would create a file if anybody unpickled it, and a second one is loaded here to prove that."""
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    message = refused(folder)
    assert f"has only pickled weights ({name}), which can run code and are never opened" in message
    assert "save_pretrained writes safetensors" in message
    assert not (tmp_path / "exploded").exists()
    pickle.loads((folder / name).read_bytes())  # noqa: S301
    assert (tmp_path / "exploded").exists()


def test_a_pickle_beside_good_weights_is_left_alone(folder: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(bomb)
    assert generate(folder).exit_code == 0
    assert not (tmp_path / "exploded").exists()


def test_a_relative_path_and_a_home_path_are_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "./model", "~/model", os.path.relpath(folder)):
        assert generate(name).exit_code == 0


def test_a_name_that_is_also_a_folder_is_the_folder(
    tmp_path: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.copy(pristine, tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert generate("owner/name").exit_code == 0
