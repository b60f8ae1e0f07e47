"""in_pool: run a phase of the start in the pool while the loop goes on, and measure how long it takes.

Owner: loop; the work runs in the pool. In: AppState and a function. Out: the function's result; its seconds in
`state.startup`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from server.state import AppState

T = TypeVar("T")


async def in_pool(state: AppState, name: str, work: Callable[[], T]) -> T:
    """Run `work` in the pool; `name` is the phase's name in the log of the start."""
    begun = time.perf_counter()
    value = await asyncio.get_running_loop().run_in_executor(state.pool, work)
    state.startup[name] = time.perf_counter() - begun
    return value
