"""One browser for a file of tests, and pages of a real server, or of one whose answers a test writes.

A browser ends with its file: while it runs, Playwright holds the thread's event loop, which tests of other files need.
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
    """Of a server with the embedded model."""
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
    """The server whose answers the test writes."""
    script_server.reset()
    return script_server


@pytest.fixture
def still(browser: Any, script: Scripted) -> Iterator[Any]:
    """A page of it."""
    with opened(browser, script.url) as page:
        yield page
