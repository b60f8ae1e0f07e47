"""Pool: the threads for text and media; while a trace is taken, their work is in it.

Owner: loop, which submits. Without a trace a submit is ThreadPoolExecutor's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.base.trace import Trace


class Pool(ThreadPoolExecutor):
    """`trace`: where spans of its work go; None: nowhere."""

    trace: Trace | None = None

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.trace is None:
            return super().submit(work, *args, **kwargs)
        return super().submit(timed, self.trace, work, *args, **kwargs)


def timed(trace: Trace, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `work`, whose span goes into the trace."""
    begun = time.perf_counter()
    try:
        return work(*args, **kwargs)
    finally:
        trace.pooled(getattr(work, "__qualname__", type(work).__name__), begun, time.perf_counter())
