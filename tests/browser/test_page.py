"""The page as people use it: asking, stopping, reloading, losing the server, on a small screen."""

import re
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.looking import LIMIT_MS, SLOW, Visitor, ask, wait_begun, wait_ended, wait_ready
from tests.server.running import Running, serving

RUNNING = "steerpipe_num_requests_running"
CANCELLED = 'steerpipe_request_success_total{finished_reason="cancelled"}'

FIGURES = {
    "first token": r"\d+ ms",
    "speed": r"[\d.]+ tokens/s",
    "hit rate": r"\d+ %",
    "guesses saved, about": r"\d+ ms",
}


def test_an_answer_comes_token_by_token_and_ends_with_its_figures(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        expect(page.locator("#model")).to_have_text(server.service.name)
        ask(page, "Hello")
        answer = page.locator("#messages li.assistant .text")
        wait_begun(page)
        early = answer.inner_text()
        expect(page.locator("#send")).to_have_text("Stop")
        wait_ended(page)
        whole = answer.inner_text()
        assert whole.startswith(early) and len(whole) > len(early)
        figures = page.locator("#messages .figures").inner_text()
        for name, value in FIGURES.items():
            assert re.search(rf"{name}\s+{value}", figures), figures
        expect(page.locator("#announce")).to_have_text(whole, use_inner_text=True)
        expect(page.locator("#prompt")).to_be_focused()
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == whole


def test_an_answer_that_is_stopped_ends_in_the_engine_too(visitor: Visitor, server: Running) -> None:
    before = server.metrics()
    with visitor.visit(server.url) as page:
        wait_ready(page)
        for stop in (lambda: page.keyboard.press("Escape"), lambda: page.locator("#send").click()):
            ask(page, "Tell me more")
            wait_begun(page)
            stop()
            wait_ended(page)
            expect(page.locator("#messages li").last.locator(".note")).to_have_text("Stopped.")
        until_idle(server)
    assert server.metrics()[CANCELLED] == before[CANCELLED] + 2


def test_a_reload_keeps_what_was_said_and_ends_what_was_not(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        ask(page, "Hello again")
        wait_begun(page)
        page.reload()
        wait_ready(page)
        assert page.locator("#messages li.user .text").inner_text() == "Hello again"
        assert page.locator("#messages li.assistant .text").inner_text()
        expect(page.locator("#messages .note")).to_have_text("The page was reloaded before the answer was complete.")
        until_idle(server)
        page.locator("#clear").click()
        expect(page.locator("#messages li")).to_have_count(0)
        ask(page, "Once more")
        wait_ended(page)
        expect(page.locator("#messages .note")).to_have_count(0)


def test_the_page_outlives_the_server(visitor: Visitor, model: Path) -> None:
    with serving(model, {"grace_seconds": 0.0}, **SLOW) as first:
        port = int(first.url.rpartition(":")[2])
        visit = visitor.visit(first.url)
        page = visit.__enter__()
        wait_ready(page)
        ask(page, "To be cut")
        wait_begun(page)
    expect(page.locator("#state")).to_have_attribute("data-state", "lost", timeout=LIMIT_MS)
    wait_ended(page)
    assert page.locator("#messages .note").inner_text()
    ask(page, "Nobody is there")
    wait_ended(page)
    expect(page.locator("#messages .note")).to_have_count(2)
    page.locator("#clear").click()
    with serving(model, {"port": port}, fast_memory="50%", max_context=128) as second:
        wait_ready(page)
        ask(page, "Hello")
        wait_ended(page)
        expect(page.locator("#messages .note")).to_have_count(0)
        assert second.metrics()["steerpipe_generation_tokens_total"] > 0
        visit.__exit__(None, None, None)


def test_everything_fits_into_320_pixels(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url, width=320, height=640) as page:
        wait_ready(page)
        ask(page, "A word that is much too long for a small screen: " + "m" * 120)
        wait_ended(page)
        assert not page.locator(".panel").evaluate("panel => panel.open"), "the chat comes first"
        for _ in range(2):
            assert page.evaluate("document.documentElement.scrollWidth") <= 320
            for each in ("#prompt", "#send", "#prediction", ".panel summary"):
                box = page.locator(each).bounding_box()
                assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 320, each
            page.locator(".panel summary").click()
        page.locator(".panel summary").click()
        expect(page.locator("#map")).to_be_visible()


def test_the_page_is_used_with_the_keyboard_alone(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("One line")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("and another")
        expect(page.locator("#messages li")).to_have_count(0)
        page.keyboard.press("Enter")
        expect(page.locator("#messages li.user .text")).to_have_text("One line\nand another", use_inner_text=True)
        page.keyboard.press("Escape")
        wait_ended(page)
        page.locator("#prediction").focus()
        page.keyboard.press("Space")
        expect(page.locator("#prediction")).to_have_attribute("aria-checked", "false")
        page.keyboard.press("Space")
        expect(page.locator("#prediction")).to_have_attribute("aria-checked", "true")


def test_the_switch_is_the_engines_and_everybody_sees_it(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page, visitor.visit(server.url) as other:
        for each in (page, other):
            wait_ready(each)
        page.locator("#prediction").click()
        expect(other.locator("#prediction")).to_have_attribute("aria-checked", "false")
        expect(other.locator("#verdict")).to_contain_text("Prediction is off")
        assert server.get("/prediction").json()["on"] is False
        other.locator("#prediction").click()
        expect(page.locator("#prediction")).to_have_attribute("aria-checked", "true")
        assert server.get("/prediction").json()["on"] is True


def test_a_server_that_wants_a_key_is_given_one(visitor: Visitor, server: Running) -> None:
    from tests.server.test_limits import changed

    with changed(server, api_keys=("first-key-of-two",)), visitor.visit(server.url) as page:
        page.locator("#key").fill("first-key-of-two")
        page.keyboard.press("Enter")
        wait_ready(page)
        ask(page, "Hello")
        wait_begun(page)
        page.reload()
        wait_ready(page)


def until_idle(server: Running) -> None:
    """Waits for the engine to have nothing to do."""
    while server.metrics()[RUNNING]:
        pass
