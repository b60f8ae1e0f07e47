"""WatchedResponse: a client that follows a stored response, from any event on, until its end or the client's leaving.

Owner: loop. The response does not depend on its readers: it goes on when they leave, and a slow reader delays neither
the response nor other readers, because each gets its events from the record (output/response_record.py).

    record changes -> flush -> frames since the last one -> EventStream.write
"""

from __future__ import annotations

import asyncio

from server.http.exchange import ClientGone, Exchange
from server.http.sse import EventStream
from server.output.response_record import ResponseRecord


class WatchedResponse:
    """Owner: loop."""

    def __init__(self, exchange: Exchange, record: ResponseRecord, begin: int) -> None:
        self.exchange = exchange
        self.record = record
        self.next = begin  # number of the event that the client has to get next
        self.events = EventStream(exchange, self.flush)

    async def run(self) -> None:
        """Until the last byte."""
        self.exchange.task = None  # a server that leaves ends the response itself, and `flush` sends its end
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
            await asyncio.sleep(0)  # lets connection_lost run before the app returns
            raise ClientGone

    def flush(self) -> None:
        """Writes what is new, unless the reader is away: then `on_writable` comes back here."""
        if not self.events.takes_more:
            return
        frames, self.next = self.record.since(self.next)
        over = self.record.last is not None
        if frames or over:
            self.events.write(frames, more=not over)
