"""A real Chromium before a real server. Without one these tests are skipped; in CI they fail."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from steerpipe.tiny import write_tiny
from tests.browser.looking import ARGUMENTS, LIMIT_MS, SLOW, Visitor
from tests.server.running import Running, serving

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    path = os.environ.get("STEERPIPE_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None and os.environ.get("REQUIRE_BROWSER"):
        pytest.fail("there is no Chromium: .ci/run installs it")
    if path is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")
    return path


@pytest.fixture(scope="module")  # it has an event loop on this thread, which other modules must not meet
def visitor(chromium_path: str) -> Iterator[Visitor]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium_path, args=ARGUMENTS, timeout=LIMIT_MS)
        yield Visitor(browser)
        browser.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy, one token per byte, and answers that fill the context."""
    folder = tmp_path_factory.mktemp("browser") / "tiny-moe"
    write_tiny("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    """Half of the experts in fast memory over a slow link: an answer takes seconds."""
    with serving(model, **SLOW) as running:
        yield running
