"""Budget: bytes that decoders may hold, reserved before they start.

Owner: loop. In: the most bytes that an item needs. Out: permission, in the order of the requests. Invariant: `used` is
the sum of the bytes that are reserved and not yet released; it never exceeds `total`. Callers bound their own wait.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """A budget of bytes that serves its callers first come, first served."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.released = 0  # bytes released since the start
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes are free and take them. `size` must not pass `total`."""
        assert size <= self.total
        if not self._waiting and self.used + size <= self.total:
            self.used += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)
            else:
                self._waiting.remove(entry)
                self._serve()
            raise

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for bytes."""
        return bool(self._waiting)

    def take(self, size: int) -> bool:
        """Take `size` bytes now, before the waiting callers, or return False. For bytes that arrive while a file is
        read.
        """
        if self.used + size > self.total:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        self.used -= size
        self.released += size
        assert self.used >= 0
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.used + self._waiting[0][1] <= self.total:
            turn, size = self._waiting.popleft()
            if not turn.cancelled():
                self.used += size
                turn.set_result(None)
