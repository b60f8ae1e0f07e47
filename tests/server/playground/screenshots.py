"""What the page looks like: light.png, dark.png and phone.png beside this file.

`python -m tests.server.playground.screenshots` draws them again with the embedded model; no test reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.end_to_end.process import SMALL, serving
from tests.server.playground.browser import answer, ask, chromium, opened

FOLDER = Path(__file__).parent
WIDE = {"viewport": {"width": 1080, "height": 680}}


def save(page: Any, name: str) -> None:
    """With 64 colours, a few tens of kilobytes."""
    import io

    from PIL import Image

    drawn = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(64)
    drawn.save(FOLDER / name, optimize=True)


def main() -> None:
    with serving(*SMALL) as process, chromium() as browser:
        url = f"http://127.0.0.1:{process.port}/"
        with opened(browser, url, color_scheme="light", **WIDE) as page:
            save(page, "light.png")
        with opened(browser, url, color_scheme="dark", **WIDE) as page:
            page.locator("#show-panel").click()
            page.get_by_role("button", name="What is in the picture?").click()
            answer(page)
            ask(page, "Count from 3 to 7.")
            answer(page, 1)
            page.locator("#numbers dd", has_text="GiB").wait_for()
            save(page, "dark.png")
        with opened(browser, url, viewport={"width": 360, "height": 640}, has_touch=True) as page:
            page.get_by_role("button", name="What is in the picture?").click()
            answer(page)
            save(page, "phone.png")


if __name__ == "__main__":
    main()
