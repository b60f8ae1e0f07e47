"""Ledger: what a server holds for requests, which must be nothing when it is idle, and what it caches (S44).

Owner: loop. In: the counts of AppState.ledger, by name. Out: the counts sorted into those that must be zero when no
request is open, and caches or totals; also the process's tasks, threads, descriptors and memory. /server_info returns
them, and a drain logs them in one line at its end.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping

from engine.device.host_memory import resident_memory

# Caches and totals: bounded by flags, or allocated on the device at start.
CACHED = frozenset({
    "media_cache_bytes", "engine_free", "engine_cached", "engine_total", "engine_index_entries",
    "engine_encoder_entries", "engine_encoder_rows", "engine_device_bytes", "engine_device_reserved_bytes",
    "engine_pinned_bytes", "engine_pinned_reserved_bytes",
})  # fmt: skip
SETTLE_S, LOOK_S = 1.0, 0.02


def sorted_out(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """`held`: zero when idle; `cached`: caches and totals; `process`: counts of the whole process."""
    return {
        "held": {name: count for name, count in counts.items() if name not in CACHED},
        "cached": {name: count for name, count in counts.items() if name in CACHED},
        "process": process(),
    }


def process() -> dict[str, int]:
    """Tasks of the loop, threads, descriptors, bytes."""
    try:
        descriptors = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:
        descriptors = -1
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": descriptors,
        "resident_bytes": resident_memory(),
    }


def still_held(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts that should be zero and are not."""
    return {name: count for name, count in counts.items() if count and name not in CACHED}


async def settled(count: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """The counts that stay above zero for SETTLE_S; the device thread frees rows in a later step."""
    end = time.monotonic() + SETTLE_S
    while (held := still_held(count())) and time.monotonic() < end:  # noqa: ASYNC110 (it is counted, nothing calls)
        await asyncio.sleep(LOOK_S)
    return held
