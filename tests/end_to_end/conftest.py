"""Servers that the tests of this folder share: one with the tiny omni model, one with the embedded model.

Each server is a separate process. It starts when a test first requests it, and stops at the end of the session with
status 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tiny
from tests.end_to_end.known import Known, answers
from tests.end_to_end.process import SMALL, ServerProcess, serving

MODEL = "tiny-omni"


@pytest.fixture(scope="session")
def server_process() -> Iterator[ServerProcess]:
    """The tiny omni model: text, pictures, sound, film; a context of 2048 tokens."""
    with serving("--model", str(tiny.checkpoint("omni")), "--served-model-name", MODEL, *SMALL) as process:
        yield process


@pytest.fixture(scope="session")
def embedded_process() -> Iterator[ServerProcess]:
    """The server without --model, as README starts it."""
    with serving() as process:
        yield process


@pytest.fixture
def port(server_process: ServerProcess) -> int:
    assert server_process.alive, server_process.log
    return server_process.port


@pytest.fixture(scope="session")
def known() -> dict[str, Known]:
    """The conversations whose answers are known, by name."""
    return answers()
