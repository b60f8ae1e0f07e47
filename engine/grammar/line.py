"""CompileLine: the queue of compiles that wait for a thread; clients are served in turn.

Owner: loop. In: a client's name with each compile. Out: a turn, in order of arrival within a client and
round-robin between clients; or GrammarBusyError if the queue is full or the client has used its share of the queue. A
compile that no caller awaits any more is cancelled, which removes it from the queue.

    alice  a1 a2 a3          runs  a1 b1, then a2, then a3
    bob    b1
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque

from engine.base.errors import GrammarBusyError

MOST_WAITING = 64
MOST_RETRY_S = 60
LIKELY_S = 0.05  # assumed seconds of a compile before the first measurement


class CompileLine:
    """The queue. Owner: loop."""

    def __init__(self, at_one_time: int) -> None:
        self._free = at_one_time
        self._at_one_time = at_one_time
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client first
        self._waiting = 0
        self._seconds = LIKELY_S  # seconds of a compile, smoothed

    @property
    def retry_after(self) -> int:
        """Estimated seconds until all waiting compiles have run."""
        return max(1, min(MOST_RETRY_S, math.ceil(self._waiting * self._seconds / self._at_one_time)))

    async def enter(self, client: str) -> None:
        """Waits for a turn, which `leave` ends. A client may have at most as many waiting compiles as free places
        remain."""
        if self._free:
            self._free -= 1
            return
        line = self._lines.get(client)
        own, room = len(line) if line else 0, MOST_WAITING - self._waiting
        if own >= room:
            raise self.busy("key_busy" if own else "queue_full", f"{self._waiting} grammars wait, {own} of this client")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if line is None:
            line = self._lines[client] = deque()
        line.append(turn)
        self._waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            else:
                self._drop(client, turn)
            raise

    def leave(self, seconds: float) -> None:
        """Ends a turn that took `seconds`."""
        self._seconds += 0.2 * (seconds - self._seconds)
        self._next()

    def busy(self, reason: str, text: str) -> GrammarBusyError:
        return GrammarBusyError(reason, f"{text}; try again later", self.retry_after)

    def _next(self) -> None:
        if not self._lines:
            self._free += 1
            return
        client, line = self._lines.popitem(last=False)
        turn = line.popleft()
        self._waiting -= 1
        if line:
            self._lines[client] = line  # after the other clients
        turn.set_result(None)

    def _drop(self, client: str, turn: asyncio.Future[None]) -> None:
        line = self._lines[client]
        line.remove(turn)
        self._waiting -= 1
        if not line:
            del self._lines[client]
