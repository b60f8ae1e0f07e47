"""What the operator sees while weights arrive: a line that grows on a terminal, one line of the log elsewhere.

Owner: the thread that builds the model. In: bytes so far and in all. Out: text on stderr, at most ten times a second;
small models are silent.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

log = logging.getLogger("omniloop.engine")

SMALL = 256 << 20  # bytes that need no words
WIDTH = 30  # characters of the bar
EVERY_S = 0.1


class WeightsLine:
    """Called with (bytes done, bytes in all)."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._begun = time.perf_counter()
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        if total < SMALL:
            return
        now = time.perf_counter()
        seconds = max(now - self._begun, 1e-6)
        if self._out.isatty() and (done == total or now - self._drawn >= EVERY_S):
            self._drawn = now
            bar = "#" * (WIDTH * done // total)
            text = f"weights [{bar:{WIDTH}}] {done / 1e9:.1f} of {total / 1e9:.1f} GB, {done / 1e9 / seconds:.1f} GB/s"
            self._out.write(f"\r{text}" + ("\n" if done == total else ""))
            self._out.flush()
        if done == total:
            log.info("weights: %.2f GB in %.2f s, %.1f GB/s", total / 1e9, seconds, total / 1e9 / seconds)
