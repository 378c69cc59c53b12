"""One good folder for all tests of the command line; none of them writes to it."""

from pathlib import Path

import pytest

from tests.faults import folders


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template, and `max_position_embeddings` of 128."""
    return folders.build(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template."""
    return folders.build(tmp_path_factory.mktemp("cli") / "plain", "mixtral", template=None)
