"""Line: the plain socket under an answer, for writes that bypass the transport (_fast/lane).

Owner: loop. In: uvicorn's state of a request. Out: transport and descriptor; or None if the answer is not chunked, not
begun or ended, or the transport has TLS or gives no access to its socket (logged once). Without a line all pieces go
through the transport. Only this file and http/protocol.py read uvicorn's attributes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger("omniloop.edge")


class Line(NamedTuple):
    """The transport still owns the descriptor: check its write buffer before each write, in the same turn of
    the loop.
    """

    transport: asyncio.Transport
    fd: int


class HeaderCase:
    """`yes` becomes False when a transport gives no access to its socket. Owner: loop."""

    yes = True


def line_of(cycle: RequestResponseCycle) -> Line | None:
    """The line of an answer, or None; see the module's docstring."""
    try:
        if not (HeaderCase.yes and cycle.response_started and cycle.chunked_encoding):
            return None
        transport = cycle.transport
        if cycle.response_complete or cycle.disconnected or transport.is_closing():
            return None
        if transport.get_extra_info("sslcontext") is not None:
            return None
        transport.get_write_buffer_size()  # the lane calls this before each write, so it must exist
        return Line(transport, transport.get_extra_info("socket").fileno())
    except (AttributeError, NotImplementedError) as error:
        HeaderCase.yes = False
        log.warning("tokens go through the transport, which costs more: this uvicorn looks different (%s)", error)
        return None
