"""Screenshots of the pages: dark.png, phone.png, formulas.png and api.png in this folder; README's is in server/docs.

`python -m tests.server.playground.screenshots` takes them again, with the embedded model; the formulas come from a
scripted answer. No test reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server import docs
from tests.end_to_end.process import SMALL, serving
from tests.server.playground.browser import answer, ask, chromium, opened
from tests.server.playground.scripted import said, scripted

FOLDER = Path(__file__).parent
FORMULAS = r"""It turns scores \(x\) into probabilities \(p\) with \(\sum_i p_i = 1\):

\[
p_i = \frac{e^{x_i / T}}{\sum_{j=1}^{n} e^{x_j / T}}
\]

| temperature | effect |
|---|---|
| $T \to 0$ | the largest score wins |
| $T = 1$ | the model's own probabilities |

```python
def softmax(x, T=1.0):
    e = np.exp((x - x.max()) / T)  # without overflow
    return e / e.sum()
```
"""
WIDE = {"viewport": {"width": 1080, "height": 680}}


def save(page: Any, path: Path) -> None:
    """Saves a screenshot with 64 colours, a few tens of kilobytes."""
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
        with opened(browser, f"{url}docs/api", color_scheme="light", **WIDE) as page:
            page.locator("#create_chat_completion summary").click()
            save(page, FOLDER / "api.png")
    with (
        scripted() as server,
        chromium() as browser,
        opened(browser, server.url, color_scheme="light", **WIDE) as page,
    ):
        server.replies.append(said(FORMULAS, prompt=700, completion=120))
        ask(page, "What does softmax do?")
        answer(page).locator(".katex").nth(4).wait_for()
        page.evaluate("document.fonts.ready")
        save(page, FOLDER / "formulas.png")


if __name__ == "__main__":
    main()
