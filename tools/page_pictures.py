"""Takes the pictures of docs/page.md: the page in a real Chromium, over the embedded model.

    python tools/page_pictures.py [FOLDER]

Needs the packages of `dev` and Chromium (Debian: apt install chromium).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

SERVE = (sys.executable, "-m", "steerpipe", "serve", "--port", "0", "--fast-memory", "25%", "--no-profile")
TALK = ("Hi, I would like to eat out tonight.", "Something Italian, please, for two people.")
KEY_MS = 60.0
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LIMIT_MS = 60_000.0


def wide(browser: Browser, url: str, file: Path) -> None:
    """In the middle of typing a second message."""
    page = opened(browser, url, 1000, 640, "dark")
    send(page, TALK[0])
    page.locator("#prompt").press_sequentially(TALK[1], delay=KEY_MS)
    expect(page.locator("#warmth")).to_contain_text("answer begun", timeout=LIMIT_MS)
    shoot(page, file)


def phone(browser: Browser, url: str, file: Path) -> None:
    page = opened(browser, url, 320, 640, "light")
    send(page, TALK[0])
    shoot(page, file)


def opened(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#state")).to_have_text("ready", timeout=LIMIT_MS)
    expect(page.locator("#model")).not_to_be_empty(timeout=LIMIT_MS)
    return page


def shoot(page: Page, file: Path) -> None:
    """In 64 colours, which takes a fraction of the bytes: what is lost lies in the edges of letters."""
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)


def send(page: Page, text: str) -> None:
    page.locator("#prompt").press_sequentially(text, delay=KEY_MS)
    page.keyboard.press("Enter")
    expect(page.locator("#messages .figures")).to_be_visible(timeout=LIMIT_MS)


def main(folder: Path) -> None:
    chromium = shutil.which("chromium") or sys.exit("there is no Chromium (Debian: apt install chromium)")
    with subprocess.Popen(SERVE, text=True, stdout=subprocess.PIPE) as server, sync_playwright() as driver:
        try:
            line = server.stdout.readline() if server.stdout else ""
            found = re.search(r"page at (\S+)", line) or sys.exit(f"the server said: {line}")
            browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            wide(browser, found[1], folder / "page-dark.png")
            phone(browser, found[1], folder / "page-phone.png")
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
