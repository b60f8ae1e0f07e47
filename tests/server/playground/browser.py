"""Debian's chromium, driven by Playwright: a page for each test, and the messages of its console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MEDIA = Path(__file__).parents[3] / "examples" / "media"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
NO_CHROMIUM = "there is no chromium: apt-get install chromium"
# Root in a container may not make sandboxes, and the only page is ours. Microphone and camera are chromium's fakes.
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--use-fake-device-for-media-stream"]
FLAGS += ["--use-fake-ui-for-media-stream"]

# The page's policy forbids evaluating strings as code, so tests wait for elements, not for expressions.
DROP = """([name, type, data]) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    for (const kind of ["dragenter", "dragover", "drop"]) {
        window.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
    }
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """A page that is ready for questions; `page.complaints` has the console's errors and warnings."""
    settings: dict[str, Any] = {
        "viewport": {"width": 1200, "height": 800},
        "permissions": ["clipboard-read"],
        **context,
    }
    with browser.new_context(**settings) as made:
        page = made.new_page()
        page.set_default_timeout(60_000)
        page.complaints = []
        page.on(
            "console", lambda told: page.complaints.append(told.text) if told.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(url)
        page.locator("body.ready").wait_for()
        yield page


def ask(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Question").fill(text)
    page.keyboard.press("Enter")


def answer(page: Any, number: int = -1) -> Any:
    """Waits until answer `number` has ended; returns its element."""
    articles = page.get_by_role("article", name="Answer")
    found = articles.last if number < 0 else articles.nth(number)
    found.get_by_role("button", name="Answer again").wait_for()
    return found


def words(found: Any) -> str:
    """The text of an answer without its reasoning."""
    said: str = found.locator("> .words").inner_text()
    return said
