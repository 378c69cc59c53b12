"""Predictors are found beside a pack, and in the package for the models that it ships."""

from pathlib import Path

import pytest

from steerpipe.predict import shipped
from steerpipe.predict.shipped import ASSETS, for_model


def test_predictors_beside_a_pack_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "pack" / "predictors"
    folder.mkdir(parents=True)
    for name in ("head-1", "head-0", "lookahead", "head-x"):
        (folder / f"{name}.safetensors").touch()
    (folder / "README.md").touch()
    found = for_model(tmp_path / "pack")
    assert found is not None
    assert set(found.files) == {"head-0", "head-1", "head-x", "lookahead"}
    assert found.heads() == {0: folder / "head-0.safetensors", 1: folder / "head-1.safetensors"}


def test_a_model_that_nobody_trained_for_has_none(tmp_path: Path) -> None:
    assert for_model(tmp_path) is None
    (tmp_path / "nano").mkdir()
    assert for_model(tmp_path / "nano") is None  # the name alone is not the package's model


def test_the_packages_models_have_theirs_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    (tmp_path / "nano").mkdir()
    folder = tmp_path / "predictors" / "nano"
    folder.mkdir(parents=True)
    assert for_model(tmp_path / "nano") is None
    (folder / "head-2.safetensors").touch()
    found = for_model(tmp_path / "nano")
    assert found is not None and found.heads() == {2: folder / "head-2.safetensors"}


def test_one_file_beside_a_pack_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    own, packages = tmp_path / "nano" / "predictors", tmp_path / "predictors" / "nano"
    for folder, names in ((own, ("reuse", "head-1")), (packages, ("reuse", "head-1", "head-2"))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.safetensors").touch()
    found = for_model(tmp_path / "nano")
    assert found is not None
    assert {name: file.parent for name, file in found.files.items()} == {
        "reuse": own, "head-1": own, "head-2": packages,
    }  # fmt: skip


def test_assets_are_where_the_package_has_them() -> None:
    assert (ASSETS / "nano" / "steerpipe.json").is_file()
