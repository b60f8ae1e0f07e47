"""Leaving: notices that the client of one exchange leaves, on a server without our extension.

Owner: loop, one per request. In: ASGI's `receive`, once the body has been read. Out: the registered calls (see LEAVING
in http/protocol.py), when `http.disconnect` comes. The first call starts a task that waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class Leaving:
    """Owner: loop. `watch` stands in for the extension; `close` ends the task."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._calls: set[Callable[[], None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._gone = False

    def watch(self, call: Callable[[], None], wanted: bool) -> None:
        """Calls `call` when the client leaves; of a client that has left already, in the loop's next turn."""
        if not wanted:
            self._calls.discard(call)
            return
        self._calls.add(call)
        if self._gone:
            asyncio.get_running_loop().call_soon(call)
        elif self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        for call in list(self._calls):
            call()

    async def close(self) -> None:
        """The exchange has ended; the calls and the task are dropped."""
        self._calls.clear()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
