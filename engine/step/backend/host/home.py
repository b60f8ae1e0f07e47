"""HostEvent: the event of a step on the host, fired by the stream's thread (engine/device/host).

Owner: made by the device thread with the step, which waits for it; the stream fires it.
"""

from __future__ import annotations

import threading
import time


class HostEvent:
    """Fires when everything launched before it has run; `fired_at` is time.perf_counter() seconds."""

    __slots__ = ("_lock", "fired_at", "found_done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.fired_at = 0.0
        self.found_done = False  # the stream says when a step has begun

    def fire(self) -> None:
        """Called once, on the stream's thread."""
        self.fired_at = time.perf_counter()
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until the event has fired; False after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._lock.release()
        return True
