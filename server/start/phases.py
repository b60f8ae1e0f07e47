"""in_pool: a phase of the start that the pool computes while the loop goes on, and how long it took.

Owner: loop; the work is in the pool. In: AppState and a function. Out: what it returns; its seconds in `state.startup`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from server.state import AppState

T = TypeVar("T")


async def in_pool(state: AppState, name: str, work: Callable[[], T]) -> T:
    """`name`: of the phase, as the log of the start has it."""
    begun = time.perf_counter()
    value = await asyncio.get_running_loop().run_in_executor(state.pool, work)
    state.startup[name] = time.perf_counter() - begun
    return value
