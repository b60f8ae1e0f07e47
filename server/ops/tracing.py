"""Tracing: starts and ends the timeline of loop, pool and device threads, and makes its file.

Owner: loop; the file is made in the pool. In: --trace FILE, for the server's whole life, or /start_profile and
/stop_profile. Out: JSON that ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import orjson

from engine.base.errors import ConfigError
from engine.base.trace import Trace
from server.ops.pool import Pool

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger("omniloop")


class Traced(Protocol):
    """The parts of AppState that a trace is attached to."""

    engine: Engine
    pool: Pool
    trace: Trace | None


def begin(state: Traced) -> Trace:
    """Start a trace; everything is recorded from now on."""
    trace = Trace()
    state.engine.trace = state.pool.trace = state.trace = trace
    return trace


def stopped(state: Traced) -> Trace:
    """Stop recording; returns the trace."""
    trace = state.trace
    assert trace is not None
    state.engine.trace = state.pool.trace = state.trace = None
    return trace


async def end(state: Traced) -> bytes:
    """End the trace; returns its file."""
    trace = stopped(state)
    return await asyncio.get_running_loop().run_in_executor(state.pool, lambda: orjson.dumps(trace.document()))


def check_place(path: str) -> None:
    """Raise ConfigError at start if the file could not be written at the end."""
    folder = Path(path).parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--trace {path}: cannot be written; name a file in a folder that this user may write")


async def write(state: Traced, path: str) -> None:
    """End the trace of --trace and write its file; an error is only logged, since the server is ending."""
    trace = stopped(state)

    def work() -> None:
        try:
            if state.engine.config.faults is not None:
                state.engine.config.faults.at("disk")
            Path(path).write_bytes(orjson.dumps(trace.document()))
        except OSError as error:
            log.error("--trace %s: %s", path, error.strerror)
        else:
            log.info("--trace %s: %d steps are written; ui.perfetto.dev opens it", path, len(trace.steps))

    await asyncio.get_running_loop().run_in_executor(state.pool, work)
