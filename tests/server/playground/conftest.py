"""One browser for each file of tests; pages of a real server, or of a server whose answers a test writes.

The browser ends with its file: while it runs, Playwright holds the thread's event loop, which other files' tests need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.process import SMALL, serving
from tests.server.playground.browser import chromium, opened
from tests.server.playground.scripted import Scripted, scripted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server with the embedded model."""
    with serving(*SMALL) as process:
        yield f"http://127.0.0.1:{process.port}/"


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as page:
        yield page
        assert page.complaints == []


@pytest.fixture(scope="module")
def script_server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture
def script(script_server: Scripted) -> Scripted:
    """The server whose answers the test writes, reset."""
    script_server.reset()
    return script_server


@pytest.fixture
def still(browser: Any, script: Scripted) -> Iterator[Any]:
    """A page of the server whose answers the test writes."""
    with opened(browser, script.url) as page:
        yield page
