"""Line: the plain socket under an answer, for those who write past the transport (_fast/lane).

Owner: loop. In: uvicorn's state of a request. Out: transport and descriptor, or None: not in chunks, not begun, ended,
TLS, or a transport that does not show its socket, of which the log hears once; then all goes through the transport.
What is looked at of uvicorn beyond http/protocol.py is here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger("omniloop.edge")


class Line(NamedTuple):
    """The descriptor stays the transport's: who writes to it asks the transport first, in the same turn of the loop."""

    transport: asyncio.Transport
    fd: int


class Shown:
    """Whether transports show their sockets, until one does not. Owner: loop."""

    yes = True


def line_of(cycle: RequestResponseCycle) -> Line | None:
    """See above."""
    try:
        if not (Shown.yes and cycle.response_started and cycle.chunked_encoding):
            return None
        transport = cycle.transport
        if cycle.response_complete or cycle.disconnected or transport.is_closing():
            return None
        if transport.get_extra_info("sslcontext") is not None:
            return None
        transport.get_write_buffer_size()  # asked before each write, so it has to be there
        return Line(transport, transport.get_extra_info("socket").fileno())
    except (AttributeError, NotImplementedError) as error:
        Shown.yes = False
        log.warning("tokens go through the transport, which costs more: this uvicorn looks different (%s)", error)
        return None
