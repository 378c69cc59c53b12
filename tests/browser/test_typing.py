"""What is typed on the page warms, and what is sent is what stands there."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from steerpipe.runtime.models import find_model
from tests.browser.looking import LIMIT_MS, Visitor, wait_ended, wait_ready
from tests.server.running import Running, serving
from tests.server.test_limits import changed

TEXT = "Hi, could you please help me to find a good restaurant"
KEY_MS = 20  # between two keys; only the length of the test depends on it


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The embedded model: its tokenizer has words, so that some of them are certain before the text is complete."""
    with serving(find_model(None), fast_memory="50%") as running:
        yield running


def test_typing_warms_and_enter_finds_the_answer_begun(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        page.locator("#prompt").press_sequentially(TEXT, delay=KEY_MS)
        expect(page.locator("#warmth")).to_contain_text("answer begun", timeout=LIMIT_MS)
        expect(page.locator("#warm")).to_have_attribute("aria-valuenow", "100")
        assert len(server.service.drafts) == 1
        page.keyboard.press("Enter")
        wait_ended(page)
        assert page.locator("#messages li.user .text").inner_text() == TEXT
        expect(page.locator("#messages .note")).to_have_count(0)
        assert "prompt ready" in page.locator("#messages .figures").inner_text()
        assert len(server.service.drafts) == 0


def test_what_is_changed_or_taken_back_is_changed_for_the_server_too(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        prompt = page.locator("#prompt")
        prompt.press_sequentially("What is thee 🙂 weather", delay=KEY_MS)
        for _ in range(len(" 🙂 weather")):
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("Backspace")
        expect(prompt).to_have_value("What is the 🙂 weather")
        page.wait_for_function("document.getElementById('warmth').textContent.includes('computed')")
        page.keyboard.press("Enter")
        wait_ended(page)
        assert page.locator("#messages li.user .text").inner_text() == "What is the 🙂 weather"
        expect(page.locator("#messages .note")).to_have_count(0)
        prompt.press_sequentially("never sent", delay=KEY_MS)
        prompt.fill("")
        expect(page.locator("#warmth")).to_contain_text("Enter sends")
        while len(server.service.drafts):
            page.wait_for_timeout(10)


@pytest.mark.parametrize("off", ["switch", "server"])
def test_without_drafts_the_message_is_sent_whole(visitor: Visitor, server: Running, off: str) -> None:
    with changed(server, drafts=off != "server"), visitor.visit(server.url) as page:
        wait_ready(page)
        if off == "switch":
            page.locator("#prediction").click()
            expect(page.locator("#verdict")).to_contain_text("Prediction is off")
        page.locator("#prompt").press_sequentially("Hello", delay=KEY_MS)
        page.keyboard.press("Enter")
        wait_ended(page)
        expect(page.locator("#messages .note")).to_have_count(0)
        assert page.locator("#messages li.assistant .text").inner_text()
        assert len(server.service.drafts) == 0
        if off == "switch":
            page.locator("#prediction").click()
            expect(page.locator("#prediction")).to_have_attribute("aria-checked", "true")
