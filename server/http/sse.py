"""EventStream: server-sent events or lines of JSON, written by the engine's callback; no task polls for them.

Owner: loop. In: finished frames (bytes) from the route. Out: each write goes straight to the transport while the
transport has room (http/protocol.py), and opens the lane through which plain tokens bypass this class (_fast/lane). The
first and the last write, and writes while the transport is full, are ASGI messages. Their send coroutine is driven by
hand: mostly it ends at once, without a task or a queue. If it waits, a task continues it and `paused` is set; the route
then merges its tokens until `on_writable` reports that the transport has room again.

    write ... write (transport full) -> paused ............ drained -> on_writable -> one merged write
                                          \\-- stall timeout -> lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.http.started import Started

if TYPE_CHECKING:
    from _fast.lane import Lane
    from server.http.exchange import Exchange

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The media type of a stream, and the bytes that keep an idle connection open; b"" if clients would read them."""

    media_type: tuple[bytes, bytes]  # as a header
    keep_alive: bytes


SSE = StreamForm((b"content-type", b"text/event-stream; charset=utf-8"), b": keep-alive\n\n")
NDJSON = StreamForm((b"content-type", b"application/x-ndjson"), b"")  # one JSON object per line
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def _nothing() -> None:
    """Replaces `on_writable` after the end of the stream."""


class EventStream:
    """One streamed answer. Owner: loop. `ended` is done when the last byte was written or the client was cut off."""

    def __init__(self, exchange: Exchange, on_writable: Callable[[], None], form: StreamForm = SSE) -> None:
        self.loop = asyncio.get_running_loop()
        self.exchange = exchange
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.paused = False
        self.lane: Lane | None = None
        self.lost = False  # the client stalled: nothing more can be written
        self._on_writable = on_writable
        self._form = form
        self._chunk = exchange.chunk
        self._interval = exchange.state.config.server.sse_keep_alive_interval if form.keep_alive else 0.0
        self.opened = False  # whether the 200 was sent; before it, an error can still send its own status
        self._last_write = self.loop.time()
        self._pump: asyncio.Task[None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._alive_timer: asyncio.TimerHandle | None = None
        if self._interval:
            self._alive_timer = self.loop.call_later(self._interval, self._keep_alive)

    @property
    def takes_more(self) -> bool:
        """Whether `write` may be called now: the reader keeps up, and the connection is open."""
        return not (self.paused or self.ended.done())

    def write(self, frames: bytes, more: bool = True) -> None:
        """Write finished frames to the connection; not while `paused`."""
        assert not self.paused, "the route keeps what it has while the reader is away"
        if self.ended.done():
            return
        if self._interval:
            self._last_write = self.loop.time()
        if more and self.opened and frames and self._chunk(frames):
            if self.lane is not None:  # all earlier frames have been written
                self.lane.open = True
            return
        if not self.opened:
            self.opened = True
            self._open()
        if not more:
            self.exchange.answered = True
        self._push({"type": "http.response.body", "body": frames, "more_body": more}, last=not more)

    def close(self) -> None:
        """End the stream, for every reason; idempotent."""
        for timer in (self._stall_timer, self._alive_timer):
            if timer is not None:
                timer.cancel()
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
        self._finish()
        self._on_writable = _nothing  # breaks the reference cycle between route and stream

    async def settle(self) -> None:
        """Wait for a pump that `close` has cancelled."""
        if self._pump is not None:
            await asyncio.gather(self._pump, return_exceptions=True)

    def _open(self) -> None:
        exchange = self.exchange
        exchange.started = True
        exchange.status = 200
        message = {
            "type": "http.response.start",
            "status": 200,
            "headers": [self._form.media_type, *HEADERS, *exchange.headers],
        }
        self._push(message, last=False)

    def _push(self, message: dict[str, Any], last: bool) -> None:
        if self.paused:  # the start of the answer found a full transport: queue after it
            assert self._pump is not None
            self._pump = self.loop.create_task(self._after(self._pump, message, last))
            return
        step: Coroutine[Any, Any, None] = self.exchange.raw_send(message)  # type: ignore[assignment]
        try:
            waiting = step.send(None)
        except StopIteration:
            if last:
                self._finish()
            return
        self.paused = True
        stall = self.exchange.state.config.limits.stream_stall_timeout
        self._stall_timer = self.loop.call_later(stall, self.give_up)
        self._pump = self.loop.create_task(self._resume(Started(step, waiting), last))

    async def _resume(self, started: Started[None], last: bool) -> None:
        await started
        self._resumed(last)

    async def _after(self, earlier: asyncio.Task[None], message: dict[str, Any], last: bool) -> None:
        await earlier
        await self.exchange.raw_send(message)
        self._resumed(last)

    def _resumed(self, last: bool) -> None:
        if self._pump is not asyncio.current_task():  # another message is queued, and goes first
            return
        self.paused = False
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        if last:
            self._finish()
        else:
            self._on_writable()

    def _finish(self) -> None:
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        if not self.ended.done():
            self.ended.set_result(None)

    def give_up(self) -> None:
        """Cut off a client that has read nothing for too long, or has too much buffered text."""
        self.lost = True
        self.exchange.reason = "stalled"
        self._finish()

    def _keep_alive(self) -> None:
        if self.ended.done():
            return
        written = self._last_write if self.lane is None else max(self._last_write, self.lane.written_at)
        silent = self.loop.time() - written
        if silent >= self._interval and not self.paused:
            self.write(self._form.keep_alive)
            silent = 0.0
        self._alive_timer = self.loop.call_later(self._interval - silent, self._keep_alive)
