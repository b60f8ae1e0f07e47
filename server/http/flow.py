"""Flow: when a connection is read, and how a client that reads nothing is cut off.

Owner: loop, one per connection. Uvicorn pauses and resumes reading for bodies; `hold` also stops reading, while enough
bytes wait for the parser. `Reader` watches a client from the moment at which the transport is full or closing. A client
that reads nothing for the stall timeout is cut off, because closing alone waits until everything is read.

    transport full or closing | watch | bytes taken: watch on | nothing taken for the stall timeout: abort
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

from server.http.patience import moment

LEAST_TAKEN = 16384  # bytes per stall timeout that even a slow client must read


class Flow(FlowControl):
    """Uvicorn's flow control, with a second reason to pause reading. Owner: loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.held = False

    def hold(self, held: bool) -> None:
        """Pause reading while enough bytes wait for the parser; resume it otherwise."""
        if held == self.held:
            return
        self.held = held
        if self.read_paused:
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            if not self.held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self.held:
                self._transport.resume_reading()


class Reader:
    """Watches whether a connection's client reads. Owner: loop."""

    __slots__ = ("_left", "_stall", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, stall: float) -> None:
        self._transport = transport
        self._stall = stall
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0  # bytes that the client still has to read

    def watch(self) -> None:
        """Start watching: the client must read from now on."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Stop watching: everything has been read, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._stall, self._check)

    def _check(self) -> None:
        self._timer = moment(self._timer, self._check)
        if self._timer is not None:
            return
        if self._left - self._transport.get_write_buffer_size() >= LEAST_TAKEN:
            self._arm()
        else:
            self._transport.abort()
