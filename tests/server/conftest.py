"""One server for all tests that need nothing special of theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from steerpipe.tiny import write_tiny
from tests.server.running import Running, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 tokens of context, one token per byte, a chat template."""
    folder = tmp_path_factory.mktemp("server") / "tiny-moe"
    write_tiny("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Running]:
    """Experts come and go, so that there is something to count; nobody needs a key."""
    with serving(model, fast_memory="50%") as running:
        yield running
