"""Pool: the threads for text and media; a trace records their work.

Owner: loop, which submits. Without a trace, `submit` is ThreadPoolExecutor's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.base.trace import Trace


class Pool(ThreadPoolExecutor):
    """A thread pool. `trace`: records spans of its work; None: no recording."""

    trace: Trace | None = None

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.trace is None:
            return super().submit(work, *args, **kwargs)
        return super().submit(timed, self.trace, work, *args, **kwargs)


def timed(trace: Trace, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `work` and add its span to the trace; returns its result."""
    begun = time.perf_counter()
    try:
        return work(*args, **kwargs)
    finally:
        trace.pooled(getattr(work, "__qualname__", type(work).__name__), begun, time.perf_counter())
