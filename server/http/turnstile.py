"""Turnstile: requests that arrive together begin a few at a time, so that tokens and probes are sent in between.

Owner: loop. Parsing, checking and admitting a request takes the loop a quarter of a millisecond. Without a turnstile,
256 simultaneous requests would do all this in one turn of the loop, and every running stream would wait. The turnstile
is before the parser: a connection that waits for it buffers what it has read, and reads no more.

    256 arrive | 2 begin | tokens | 2 begin | tokens | ...
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 2  # about half a millisecond of work


class Turnstile:
    """Admits requests, first come, first served. Owner: loop."""

    def __init__(self) -> None:
        self._left = PER_TURN  # requests that may still begin in this turn of the loop
        self._turning = False
        self._waiting: deque[Callable[[], None]] = deque()

    def enter(self, later: Callable[[], None]) -> bool:
        """Whether this turn of the loop has room for one more; if not, `later` is called in a turn that has room."""
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return True
        self._waiting.append(later)
        return False

    def _turn(self) -> None:
        """Begin a new turn of the loop; no further turn is scheduled after one that admitted no request."""
        self._turning = bool(self._waiting) or self._left < PER_TURN
        self._left = PER_TURN
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
        while self._left and self._waiting:
            self._left -= 1
            self._waiting.popleft()()
