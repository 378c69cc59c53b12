"""What the page shows is what `/metrics` says; and everybody can perceive it."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.looking import Visitor, ask, shown, wait_ended, wait_ready
from tests.server.running import Running, serving

PLACES = ("fast", "moving", "ram", "disk")
REASONS = ("demand", "prefetch", "draft")
MOVING = 'steerpipe_experts{place="moving"}'

# Reads the picture itself: a corner of every cell has the colour of the place where the expert lies.
_COUNT_CELLS = """() => {
  const canvas = document.getElementById("map"), cell = Number(canvas.dataset.cell);
  const style = getComputedStyle(canvas);
  const pen = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (from, x, y) => [...from.getImageData(x, y, 1, 1).data].join();
  const names = {};
  for (const place of ["fast", "moving", "ram", "disk"]) {
    probe.fillStyle = style.getPropertyValue(`--${place}`);
    probe.fillRect(0, 0, 1, 1);
    names[pixel(probe, 0, 0)] = place;
  }
  const found = [];
  for (let y = 0; y < canvas.height; y += cell)
    for (let x = 0; x < canvas.width; x += cell) found.push(names[pixel(pen, x, y)] || "unknown");
  return found;
}"""


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    """Half of the experts in fast memory."""
    with serving(model, fast_memory="50%", max_context=128) as running:
        yield running


def test_map_and_bars_equal_the_metrics_after_a_session(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        for text in ("Hello", "What is it?"):
            ask(page, text)
            wait_ended(page)
            expect(page.locator("#messages .note")).to_have_count(0)
            page.locator("#clear").click()
        metrics = settled(server)
        tiers = {place: metrics[f'steerpipe_experts{{place="{place}"}}'] for place in PLACES}
        moved = {reason: metrics[read_bytes(reason)] for reason in REASONS}
        assert moved["demand"] > 0, "something was missing"
        for name, values in (("place", tiers), ("reason", moved)):
            for each, value in values.items():
                expect(page.locator(f'[data-{name}="{each}"]')).to_have_attribute("value", str(int(value)))
        cells = Counter(page.evaluate(_COUNT_CELLS))
        assert cells == {place: count for place, count in tiers.items() if count}
        assert shown(page, '[data-place="used"]') > 0
        widths = page.eval_on_selector_all(".bar", "bars => bars.map(bar => bar.getBoundingClientRect().width)")
        sizes = list(moved.values())
        assert widths == pytest.approx([max(1.0, max(widths) * size / max(sizes)) for size in sizes], abs=0.5)


def settled(server: Running) -> dict[str, float]:
    """When nothing moves any more: a guess may outlast the answer that it was made for."""
    names = [*map(read_bytes, REASONS), MOVING]
    before, now = {}, server.metrics()
    while now[MOVING] or any(before.get(name) != now[name] for name in names):
        before, now = now, server.metrics()
    return now


def read_bytes(reason: str) -> str:
    return f'steerpipe_expert_read_bytes_total{{reason="{reason}"}}'


def test_the_pictures_are_told_in_words_and_the_last_state_is_among_them(visitor: Visitor, server: Running) -> None:
    with visitor.visit(server.url) as page:
        wait_ready(page)
        for text in ("Hello", "And now?"):  # within the second in which nothing is told again
            ask(page, text)
            wait_ended(page)
        settled(server)
        fast, used = (int(shown(page, f'[data-place="{place}"]')) for place in ("fast", "used"))
        words = rf"{fast} in fast memory, .*; {used} used by the last step"
        expect(page.locator("#map")).to_have_attribute("aria-label", re.compile(words))
        expect(page.locator("#streams")).to_have_attribute("aria-label", re.compile("compute"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1200])
def test_axe_finds_nothing_serious(visitor: Visitor, server: Running, scheme: str, width: int) -> None:
    with visitor.visit(server.url, width=width, scheme=scheme) as page:
        wait_ready(page)
        ask(page, "Hello")
        wait_ended(page)
        page.locator(".panel").evaluate("panel => { panel.open = true; }")
        found = [each for each in axe(page)["violations"] if each["impact"] in ("serious", "critical")]
        assert not found, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def axe(page: Page) -> dict[str, Any]:
    """axe-core, run by the debugger: the page's own rules for scripts stay in force."""
    from axe_playwright_python.sync_playwright import Axe

    response: dict[str, Any] = Axe().run(page).response
    return response
