"""Times of the page, as medians: until the page is ready, and from a question to a finished answer of 200 kB.

`python -m tests.server.playground.timing [FOLDER ...]` compares the page of this checkout with those of other
checkouts, interleaved in one browser. The server is real, but the answer is scripted, in events of 100 characters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.end_to_end.process import ROOT, serving
from tests.server.playground.browser import chromium, opened

FLAGS = ("--num-threads", "1", "--max-num-seqs", "16", "--disable-access-log")  # flags that other checkouts have too
SIZE = 200_000
PIECE = 100
SECTION = """## Part {at} of the answer

The cache holds *keys* and **values** of every token, so a step computes one row; `append(row)` costs O(1), and a look
at [the paper](https://example.org/{at}) shows why. Prices rose from 5 to 10 in {at} years, and nothing else changed.

1. first, a list with an item that is long enough for a second line on most screens, as items of models are
2. second, with `code` and **bold {at}**
   - inside, one
   - inside, two

| name | value | reason |
|---|--:|---|
| rows | {at} | because there are so many |
| columns | 3 | because the table is small |

```python
def step{at}(rows: list[int], limit: int = {at}) -> int:
    # adds what is below the limit
    return sum(row for row in rows if row < limit)
```

"""


def long_answer() -> str:
    """200 kB of a model's typical text."""
    text = ""
    at = 0
    while len(text) < SIZE:
        at += 1
        text += SECTION.format(at=at)
    return text[:SIZE]


def events_of(text: str) -> str:
    pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
    chunks = ({"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces)
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def ready_s(browser: Any, url: str) -> float:
    begun = time.perf_counter()
    with opened(browser, url):
        return time.perf_counter() - begun


def answer_s(browser: Any, url: str) -> float:
    body = events_of(long_answer())
    with opened(browser, url) as page:
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(headers={"content-type": "text/event-stream"}, body=body),
        )
        page.get_by_role("textbox", name="Question").fill("A long answer")
        begun = time.perf_counter()
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Answer again").wait_for()
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="*", type=Path, help="other checkouts, built")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    with ExitStack() as stack:
        folders = [*args.folder, ROOT]
        servers = [stack.enter_context(serving(*FLAGS, cwd=folder)) for folder in folders]
        browser = stack.enter_context(chromium())
        urls = [f"http://127.0.0.1:{server.port}/" for server in servers]
        for name, measure in (("ready", ready_s), ("200 kB", answer_s)):
            taken: list[list[float]] = [[] for _ in urls]
            for run in range(args.runs + 1):
                for times, url in zip(taken, urls, strict=True):
                    seconds = measure(browser, url)
                    if run:  # the first run warms up
                        times.append(seconds)
            for folder, times in zip(folders, taken, strict=True):
                print(
                    f"{name:8} {statistics.median(times):.3f} s  (from {min(times):.3f} to {max(times):.3f})  {folder}"
                )


if __name__ == "__main__":
    main()
