"""TokenStream: the answer to one request as it grows, on the loop.

Owner: loop. In: the tokens that the engine routes to each choice after a step. Out: Delta objects, pulled (`async for`)
or pushed (`subscribe`). Leaving the stream aborts the choices that still run; cancellation, disconnect and deadline
all use this path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from engine.base.request import Delta, FinishReason, Request

if TYPE_CHECKING:
    from _fast.lane import Lane


class Routes(Protocol):
    """The part of the engine that a stream uses."""

    def drop(self, device_id: int) -> None:
        """Ends one choice on the device thread; the choice delivers nothing more."""

    def conclude(self, device_id: int) -> None:
        """Ends one choice that waits for extras of its tokens; the choice delivers only these extras."""

    def forget(self, stream: TokenStream) -> None:
        """Removes the routes of a stream whose choices have all ended."""


class Drafted(Protocol):
    """Takes the drafts of a choice."""

    def add(self, drafts: int, accepted: int) -> None:
        """A step verified so many drafts, of which so many were right; its tokens follow."""


class TokenStream:
    """All choices of one request. Each choice ends with exactly one Delta whose finish_reason is not NONE."""

    __slots__ = ("_callback", "_open", "_pending", "_routes", "_waiter", "drafted", "first_id", "lane", "request")

    def __init__(self, routes: Routes, request: Request, first_id: int) -> None:
        self.request = request
        self.first_id = first_id  # choice k is known to the device thread as first_id + k
        self.lane: Lane | None = None  # sends tokens without the callback; possible with one choice and a plain socket
        self.drafted: Drafted | None = None  # receives the drafts of the only choice
        self._routes = routes
        self._open = set(range(request.n))  # choices without a final Delta
        self._pending: dict[int, Delta] = {}  # choice -> merged Delta that was not pulled yet
        self._callback: Callable[[Delta], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> int:
        """The engine's own number for the request."""
        return self.first_id

    @property
    def done(self) -> bool:
        """True when every choice has ended."""
        return not self._open

    def subscribe(self, callback: Callable[[Delta], None]) -> None:
        """From now on each Delta goes directly to `callback`, on the loop, while the step's output is delivered."""
        self._callback = callback
        pending, self._pending = self._pending, {}
        for delta in pending.values():
            callback(delta)

    def feed(self, delta: Delta) -> None:
        """Adds a step's Delta for one choice; the engine calls it."""
        if delta.index not in self._open:
            return
        if delta.finish_reason is not FinishReason.NONE:
            self._open.discard(delta.index)
        if self._callback is not None:
            self._callback(delta)
            return
        held = self._pending.get(delta.index)
        if held is None:
            self._pending[delta.index] = delta
        else:
            _merge(held, delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def stop_choice(self, index: int) -> None:
        """Ends one choice because its text contains a stop string; the choice delivers nothing more."""
        if index in self._open:
            self._open.discard(index)
            self._routes.drop(self.first_id + index)

    def conclude(self, index: int) -> None:
        """Ends one choice that needs no more tokens; a last Delta brings the extras of its tokens."""
        if index in self._open:
            self._routes.conclude(self.first_id + index)

    def abort(self) -> None:
        """Ends every open choice; a remaining reader gets a final Delta with ABORT for each choice."""
        for index in sorted(self._open):
            self._routes.drop(self.first_id + index)
            self.feed(Delta(index, [], FinishReason.ABORT))
        self._routes.forget(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pending.pop(next(iter(self._pending)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the stream: choices that still run are aborted, and nothing more is reported."""
        for index in self._open:
            self._routes.drop(self.first_id + index)
        self._open.clear()
        self._pending.clear()
        self._callback = None
        self.lane = None
        self._routes.forget(self)


def _merge(held: Delta, delta: Delta) -> None:
    """Appends a later Delta of the same choice to a Delta that is still unread."""
    held.token_ids += delta.token_ids
    held.finish_reason = delta.finish_reason
    held.stop_token_id = delta.stop_token_id
    held.error = delta.error
    held.extras |= delta.extras
    if delta.logprobs is not None:
        held.logprobs = (held.logprobs or []) + delta.logprobs
