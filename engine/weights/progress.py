"""The progress display while weights are loaded: a progress bar on a terminal, one log line elsewhere.

Owner: the thread that builds the model; during a download, any thread that has written bytes. In: bytes so far and in
total. Out: text on stderr, at most ten times a second; nothing for small models.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TextIO

log = logging.getLogger("omniloop.engine")

SMALL = 256 << 20  # bytes below which nothing is displayed
WIDTH = 30  # characters of the bar
EVERY_S = 0.1


class ProgressLine:
    """A progress line on stderr: call it with the bytes done so far and their total, or `add` new bytes."""

    def __init__(self, name: str = "weights", total: int = 0, out: TextIO | None = None) -> None:
        self._name = name
        self._total = total  # for `add`
        self._out = sys.stderr if out is None else out
        self._begun = time.perf_counter()
        self._drawn = 0.0
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Called with new bytes, from any thread."""
        with self._lock:
            self._done += count
            self(self._done, self._total)

    def __call__(self, done: int, total: int) -> None:
        if total < SMALL:
            return
        now = time.perf_counter()
        seconds = max(now - self._begun, 1e-6)
        rate = f"{done / 1e9 / seconds:.1f} GB/s" if done >= 1e8 * seconds else f"{done / 1e6 / seconds:.1f} MB/s"
        if self._out.isatty() and (done == total or now - self._drawn >= EVERY_S):
            self._drawn = now
            bar = "#" * (WIDTH * done // total)
            text = f"{self._name} [{bar:{WIDTH}}] {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate}"
            self._out.write(f"\r{text}" + ("\n" if done == total else ""))
            self._out.flush()
        if done == total:
            log.info("%s: %.2f GB in %.2f s, %s", self._name, total / 1e9, seconds, rate)
