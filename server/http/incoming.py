"""Incoming: one body while it arrives: its size, its deadlines, its minimum rate, its share of the budget.

Owner: loop, one per body. In: ASGI messages. Out: pieces, or 413, 408, 429. Content-Length is checked first, but the
bytes are counted too. The first 64 KiB of a body do not count against the budget (a connection buffers as much anyway),
so many large uploads cannot make a small request fail. A body sent faster than the minimum rate may pause later, but
for at most --body-idle-timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from server.errors import ApiError
from server.http.exchange import ClientGone
from server.http.started import Started

if TYPE_CHECKING:
    from server.state import AppState

SMALL = 64 << 10  # bytes of each body that do not count against the budget
GRACE_S = 5.0  # seconds before the minimum rate applies


class Incoming:
    """One body. Owner: the handler that reads it; `close` releases its bytes."""

    __slots__ = (
        "_begun",
        "_budget",
        "_client",
        "_held",
        "_limit",
        "_limits",
        "_paid_until",
        "_request",
        "more",
        "size",
        "taken",
    )

    def __init__(self, request: Request, limit: int, held: bool = True) -> None:
        """Raises ApiError if the announced length exceeds `limit` or the free budget.

        `held`: the reader holds the whole body; otherwise it counts only against `limit`.
        """
        state: AppState = request.scope["exchange"].state
        self.more = True
        self.size = 0
        self.taken = 0  # bytes taken from the budget
        self._request = request
        self._limit = limit
        self._held = held
        self._limits = state.config.limits
        self._budget = state.body_budget
        self._client = ""
        self._begun = time.monotonic()
        self._paid_until = self._begun + GRACE_S
        promised = promised_length(request)
        if promised > limit:
            raise too_large(limit)
        if held and promised > SMALL:
            self._client = request.scope["exchange"].client
            if not self._budget.has_room(self._client, promised - SMALL):
                raise self._budget.full(self._client, promised - SMALL)

    async def next(self) -> bytes:
        """The next piece; a piece that has already arrived needs no deadline."""
        receiving: Coroutine[Any, Any, dict[str, Any]] = self._request.receive()  # type: ignore[assignment]
        try:
            waiting = receiving.send(None)
        except StopIteration as received:
            message: dict[str, Any] = received.value
        else:
            message = await self._awaited(Started(receiving, waiting))
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        self.more = message.get("more_body", False)
        self._count(len(piece))
        return piece

    def close(self) -> None:
        """Release the body's bytes; idempotent."""
        if self.taken:
            self._budget.give(self._client, self.taken)
            self.taken = 0

    async def _awaited(self, receiving: Started[dict[str, Any]]) -> dict[str, Any]:
        limits = self._limits
        left = self._begun + limits.body_timeout - time.monotonic()
        try:
            async with asyncio.timeout(min(limits.body_idle_timeout, left)):
                return await receiving
        except TimeoutError:
            raise upload_timeout() from None

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > self._limit:
            raise too_large(self._limit)
        more = self.size - SMALL - self.taken
        if self._held and more > 0:
            self._client = self._client or self._request.scope["exchange"].client
            self._budget.require(self._client, more)
            self.taken += more
        if self.more:
            self._check_rate(size)

    def _check_rate(self, size: int) -> None:
        limits, now = self._limits, time.monotonic()
        self._paid_until = min(self._paid_until + size / limits.min_upload_rate, now + limits.body_idle_timeout)
        if now > self._paid_until:
            raise upload_timeout()


def too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit} bytes")


def upload_timeout() -> ApiError:
    return ApiError(408, "upload_timeout", "the body arrived too slowly", close=True)


def promised_length(request: Request) -> int:
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 20 else 0
    return 0
