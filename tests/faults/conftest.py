"""A good folder, built once; each test gets a copy to damage."""

from pathlib import Path

import pytest

from tests.faults import folders


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.build(tmp_path_factory.mktemp("pristine") / "model")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return folders.copy(pristine, tmp_path / "model")
