"""What the page looks like: dark.png and phone.png in this folder, and the picture of README in server/docs.

`python -m tests.server.playground.screenshots` draws them again with the embedded model; no test reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server import docs
from tests.end_to_end.process import SMALL, serving
from tests.server.playground.browser import answer, ask, chromium, opened

FOLDER = Path(__file__).parent
WIDE = {"viewport": {"width": 1080, "height": 680}}


def save(page: Any, path: Path) -> None:
    """With 64 colours, a few tens of kilobytes."""
    import io

    from PIL import Image

    drawn = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(64)
    drawn.save(path, optimize=True)


def main() -> None:
    with serving(*SMALL) as process, chromium() as browser:
        url = f"http://127.0.0.1:{process.port}/"
        for scheme, path in (("light", docs.FOLDER / docs.PICTURES[0]), ("dark", FOLDER / "dark.png")):
            with opened(browser, url, color_scheme=scheme, **WIDE) as page:
                page.locator("#show-panel").click()
                page.get_by_role("button", name="What is in the picture?").click()
                answer(page)
                ask(page, "Count from 3 to 7.")
                answer(page, 1)
                page.locator("#numbers dd", has_text="GiB").wait_for()
                save(page, path)
        with opened(browser, url, viewport={"width": 360, "height": 640}, has_touch=True) as page:
            page.get_by_role("button", name="What is in the picture?").click()
            answer(page)
            save(page, FOLDER / "phone.png")


if __name__ == "__main__":
    main()
