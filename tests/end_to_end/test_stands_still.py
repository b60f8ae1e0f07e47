"""The process stalls for longer than a client may: clients that sent in time still get their answers."""

from __future__ import annotations

import socket
import time

from tests import tiny
from tests.end_to_end.hostile import answer, dial
from tests.end_to_end.inside import InsideServer, inside
from tests.end_to_end.process import SMALL

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def standing_still(server: InsideServer, link: socket.socket, seconds: float) -> int:
    """The status of a request that arrives while the loop blocks in another socket's callback for `seconds`."""
    mine, theirs = socket.socketpair()

    def still() -> None:
        if server.listener.server_state.connections:
            loop.remove_reader(theirs)
            link.sendall(GET)
            time.sleep(seconds)

    async def readable() -> None:
        loop.add_reader(theirs, still)
        mine.send(b"x")

    loop = server.loop
    server.call(readable)
    with mine, theirs:
        return answer(link)[0]


def test_a_request_that_came_in_time_is_answered_after_a_standstill():
    flags = ("--header-timeout", "0.3", "--keepalive-timeout", "1")
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *flags) as server, dial(server.port) as link:
        assert standing_still(server, link, 0.6) == 200, "the first on its connection"
        assert standing_still(server, link, 1.3) == 200, "one on a connection that was idle"
