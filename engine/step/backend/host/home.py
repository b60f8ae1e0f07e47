"""HostEvent: the event of a step on the host, fired by the stream's thread (engine/device/host).

Owner: the device thread makes the event with the step and waits for the event; the stream's thread fires it.
"""

from __future__ import annotations

import threading
import time


class HostEvent:
    """Fires when the step's work on the stream has run; `fired_at`: seconds of time.perf_counter()."""

    __slots__ = ("_lock", "fired_at", "found_done")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.fired_at = 0.0
        self.found_done = False  # always False: the stream itself notes when a step begins

    def fire(self) -> None:
        """Fires the event; called once, on the stream's thread."""
        self.fired_at = time.perf_counter()
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until the event has fired; False after `timeout` seconds."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._lock.release()
        return True
