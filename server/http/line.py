"""Line: the plain socket under an answer, for writes that bypass the transport (_fast/lane); other ways to write one.

Owner: loop. In: uvicorn's state of a request. Out: transport and descriptor; or None if the answer is not chunked, not
begun or ended, or the transport has TLS or gives no access to its socket (logged once). Without a line all pieces go
through the transport. Only this file and http/protocol.py read uvicorn's attributes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def chunk_writer(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """A function that writes a piece of a started answer. It returns False if the piece must go through ASGI's `send`.

    It takes a third of the time of `send`, once per token.
    """
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(piece: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    return write_chunk


def until_close(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The app for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection."""

    async def old(scope: Scope, receive: Receive, send: Send) -> None:
        sized = False

        async def write(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not sized:  # uvicorn compares each piece with the length that is left
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, write)

    return old
