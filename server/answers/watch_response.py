"""WatchedResponse: a client that reads a stored response's events, from any event on, until the end or its disconnect.

Owner: loop. The response does not depend on its readers: it continues when they disconnect, and a slow reader delays
neither the response nor other readers, because each reads its events from the record (output/response_record.py).

    record changes -> flush -> frames since the last one -> EventStream.write
"""

from __future__ import annotations

import asyncio

from server.http.exchange import ClientGone, Exchange
from server.http.sse import EventStream
from server.output.response_record import ResponseRecord


class WatchedResponse:
    """One reader of a stored response. Owner: loop."""

    def __init__(self, exchange: Exchange, record: ResponseRecord, begin: int) -> None:
        self.exchange = exchange
        self.record = record
        self.next = begin  # number of the next event for this client
        self.events = EventStream(exchange, self.flush)

    async def run(self) -> None:
        """Stream events until the last byte."""
        self.exchange.task = None  # at shutdown the server ends the response itself, and `flush` sends its last event
        self.record.watchers.add(self.flush)
        try:
            self.flush()
            await self.events.ended
        finally:
            self.record.watchers.discard(self.flush)
            self.events.close()
            await self.events.settle()
        if self.events.lost:
            self.exchange.abort()
            await asyncio.sleep(0)  # let connection_lost run before the app returns
            raise ClientGone

    def flush(self) -> None:
        """Write new events, unless the reader is slow: then `on_writable` calls `flush` again."""
        if not self.events.takes_more:
            return
        frames, self.next = self.record.since(self.next)
        over = self.record.last is not None
        if frames or over:
            self.events.write(frames, more=not over)
