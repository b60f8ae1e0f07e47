"""Leaving: notices that the client of one exchange disconnects, on a server without our extension.

Owner: loop, one per request. In: ASGI's `receive`, once the body has been read. Out: the registered calls (see LEAVING
in http/protocol.py) when `http.disconnect` arrives. The first registration starts a task that waits for this message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class Leaving:
    """Watches for a disconnect. Owner: loop. `watch` replaces the extension; `close` ends the task."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._calls: set[Callable[[], None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._gone = False

    def watch(self, call: Callable[[], None], wanted: bool) -> None:
        """Call `call` when the client disconnects; if it already has, in the loop's next turn. `wanted` False: remove
        `call`.
        """
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
        """Drop the calls and the task: the exchange has ended."""
        self._calls.clear()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
