"""Disconnects and deadlines: the two ways a handler is cancelled from outside.

Owner: loop. After the body is read, one small task waits for the client to leave; when it does, the handler's task is
cancelled, which leaves the TokenStream, which aborts the request (SECURITY S12). A deadline ends as 504.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from server.errors import ApiError, deadline
from server.http.exchange import ClientGone


@asynccontextmanager
async def client_present(request: Request) -> AsyncIterator[None]:
    """Cancels the body of the `async with` when the client disconnects, and turns that into ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    gone = False
    exchange = request.scope["exchange"]

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass  # a server may report the end of the body once more
        if exchange.answered:  # the answer's own end is reported in the same words
            return
        gone = True
        task.cancel("client disconnected")

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        if gone and task.cancelling():
            task.uncancel()


@asynccontextmanager
async def within(seconds: float, text: str) -> AsyncIterator[asyncio.Timeout]:
    """504 `deadline` after `seconds`; 0 is no limit."""
    try:
        async with asyncio.timeout(seconds or None) as timeout:
            yield timeout
    except TimeoutError:
        if timeout.expired():
            error: ApiError = deadline(text)
            raise error from None
        raise
