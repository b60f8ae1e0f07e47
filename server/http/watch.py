"""Disconnects and deadlines: the two external reasons to cancel a handler.

Owner: loop. After the body is read, the connection reports a disconnect. The handler's task is then cancelled: it
closes its TokenStream, which aborts the request (SECURITY S12). A missed deadline is answered with 504. Every request
uses both, so they are plain objects: no task, no generator.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.requests import Request

from server.errors import deadline
from server.http.exchange import ClientGone

if TYPE_CHECKING:
    from server.http.exchange import Exchange


def client_present(request: Request) -> ClientPresent:
    """Cancel the body of the `async with` when the client disconnects, and raise ClientGone instead."""
    return ClientPresent(request.scope["exchange"])


class ClientPresent:
    """See `client_present`. Owner: the handler's task."""

    __slots__ = ("_exchange", "_gone", "_task")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._exchange.watch(self._left, True)

    def _left(self) -> None:
        if not self._exchange.answered:
            self._gone = True
            self._task.cancel("client disconnected")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._exchange.watch(self._left, False)
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGone from None


def preparing(exchange: Exchange, what: str = "prompt") -> Within:
    """Raise the 504 `deadline` if the preparation of `what` takes longer than --prepare-timeout; 0 is no limit."""
    seconds = exchange.state.config.limits.prepare_timeout
    return Within(seconds, f"the {what} took longer than --prepare-timeout")


class Within:
    """See `preparing`. Owner: the handler's task."""

    __slots__ = ("_text", "_timeout")

    def __init__(self, seconds: float, text: str) -> None:
        self._text = text
        self._timeout = asyncio.timeout(seconds or None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, tb)
        except TimeoutError:
            raise deadline(self._text) from None
