"""Turnstile: a crowd of requests begins a few at a time, so that tokens and probes go out in between.

Owner: loop. Reading, checking and rendering a request takes the loop some 0.2 ms before it first waits. Without this,
256 that arrive together would all do so in one turn of the loop, and every running stream would stand still meanwhile.

    256 arrive | 4 begin | tokens | 4 begin | tokens | ...
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 4  # under 1 ms of work


class Turnstile:
    """First come, first served. Owner: loop."""

    def __init__(self) -> None:
        self._left = PER_TURN  # in this turn of the loop
        self._turning = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Returns in a turn of the loop that has room for one more; at once, where nobody is before."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        """A new turn; stops when one has let nobody in."""
        idle = self._left == PER_TURN and not self._waiting
        self._left = PER_TURN
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # the client has gone
                place.set_result(None)
                self._left -= 1
        self._turning = not idle
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
