"""What a person does with the page, in a browser that tells everything that goes wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

SLOW = {"fast_memory": "50%", "pace": "500kB", "max_context": 256}  # of an engine whose answers take seconds
LIMIT_MS = 60_000.0  # reached only where something hangs
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
_EXPECTED = ("Failed to load resource", "net::ERR_")  # a server that is gone, or wants a key


class Visitor:
    """Opens pages. A page that says something in its console, or asks another server, fails the test."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def visit(self, url: str, *, width: int = 1200, height: int = 760, scheme: Any = "light") -> Iterator[Page]:
        context = self._browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        complaints: list[str] = []

        def console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not any(each in message.text for each in _EXPECTED):
                complaints.append(message.text)

        def asked(request: Request) -> None:
            if urlsplit(request.url).netloc != urlsplit(url).netloc:
                complaints.append(f"asked {request.url}")

        page.on("console", console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", asked)
        try:
            page.goto(url)
            yield page
            assert not complaints, complaints
        finally:
            context.close()


def wait_ready(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("ready", timeout=LIMIT_MS)


def ask(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def wait_begun(page: Page) -> None:
    """Some of the answer is there."""
    expect(page.locator("#messages li.assistant").last.locator(".text")).not_to_be_empty(timeout=LIMIT_MS)


def wait_ended(page: Page) -> None:
    expect(page.locator("#send")).to_have_text("Send", timeout=LIMIT_MS)
    expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=LIMIT_MS)


def shown(page: Page, selector: str) -> float:
    """The exact number behind what is written."""
    return float(page.locator(selector).get_attribute("value") or "nan")
