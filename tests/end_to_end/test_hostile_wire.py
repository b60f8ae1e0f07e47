"""Connections that try to stop the server: connections without a timer, floods in one read, late bytes.

Each case represents its kind. The delay for another client and the server's memory are measured over real sockets.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.end_to_end.hostile import (
    GAP_S,
    MIB,
    Neighbour,
    answer,
    ask,
    closing_code,
    dial,
    frame,
    open_socket,
    peak,
    status_of,
)
from tests.end_to_end.process import SMALL, ServerProcess, serving

CONNECTIONS = 60
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
KEY = "Authorization: Bearer right\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with keys that have no names."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("first\nsecond\nright\n")
    return path


@pytest.fixture(scope="module")
def guarded(keys: Path) -> Iterator[ServerProcess]:
    """A server with short deadlines, few connections, and keys."""
    flags = ("--api-key-file", str(keys), "--max-connections", str(CONNECTIONS), "--header-timeout", "1")
    flags += ("--stream-stall-timeout", "2", "--keepalive-timeout", "5", "--trusted-proxies", "127.0.0.9")
    with serving("--model", str(tiny.checkpoint("omni")), "--served-model-name", "tiny", *SMALL, *flags) as process:
        yield process


def closed_within(link: socket.socket, seconds: float) -> bool:
    """Whether the server closes a connection in time; bytes sent before that are ignored."""
    link.settimeout(seconds)
    try:
        while link.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


OFFERS = (
    b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n",
    b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: close\r\nConnection: Upgrade\r\nUpgrade: x\r\n",
    b"Connection: Upgrade, keep-alive\r\nUpgrade: h2c\r\n",
)


@pytest.mark.parametrize("offer", OFFERS)
def test_s11_an_offer_that_also_closes_is_answered(guarded, offer):
    with dial(guarded.port) as link:
        link.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
        assert answer(link)[0] == 200
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    with dial(guarded.port) as link:
        head = POST + KEY.encode() + offer + b"Content-Length: %d\r\n\r\n" % len(body)
        link.sendall(head + body)
        assert answer(link)[0] == 200


SILENT = {
    "nothing": b"",
    "an empty line": b"\r\n",
    "half a line": b"GET /ver",
    "a head": b"GET /version HTTP/1.1\r\nHost: localhost\r\n",
    "an offer and silence": b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX: y\r\n",
    "an empty line behind an answer": GET + b"\r\n",
    "half a request behind an answer": GET + b"GE",
}


def test_s11_no_connection_is_without_a_timer(guarded):
    """Each of these connections is closed in time, and its seat is free again."""
    links = []
    for data in SILENT.values():
        links += [dial(guarded.port) for _ in range(3)]
        for link in links[-3:]:
            link.sendall(data)
    late = dial(guarded.port)
    late.sendall(GET)
    assert answer(late)[0] == 200
    late.sendall(b"\r\n")  # neither a request nor an idle connection
    for link in (late, *links):
        assert closed_within(link, 15), "a connection outlived its deadlines"
        link.close()


def test_s11_a_client_that_never_reads_is_cut_off(guarded):
    """The answers do not fit into the sockets' buffers: also single answers, with and without Connection: close."""
    with dial(guarded.port) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(0.2)
        with contextlib.suppress(TimeoutError, OSError):
            for _ in range(40):
                link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n" + KEY.encode() + b"\r\n")
        before = seats(guarded.port)
        deadline = time.monotonic() + 20
        while seats(guarded.port) >= before:
            assert time.monotonic() < deadline, "the connection is held for a client that does not read"
            time.sleep(0.1)


def seats(port: int) -> int:
    """The server's connections on this port in the kernel's states ESTABLISHED or CLOSE_WAIT."""
    with open("/proc/net/tcp", encoding="ascii") as table:
        return sum(f":{port:04X} " in line[:22] and line.split()[3] in ("01", "08") for line in table)


def test_s11_an_address_leaves_room_for_others(guarded):
    """One address opens all connections that it may; a trusted proxy may open all connections."""
    links = [dial(guarded.port) for _ in range(CONNECTIONS + 5)]
    try:
        assert ask(guarded.port, "GET", "/version", source="127.0.0.2")[0] == 200
        refused = [link for link in links if is_refused(link)]
        assert 5 < len(refused) < CONNECTIONS // 2
    finally:
        for link in links:
            link.close()
    listed = [dial(guarded.port, source="127.0.0.9") for _ in range(CONNECTIONS - 1)]
    try:
        listed[-1].sendall(GET)
        assert answer(listed[-1])[0] == 200
    finally:
        for link in listed:
            link.close()


def is_refused(link: socket.socket) -> bool:
    link.settimeout(0.01)
    try:
        return status_of(link.recv(64)) == 503
    except TimeoutError:
        return False


# -- floods in one read


def test_what_the_neighbour_measures(guarded):
    """A stopped process does not count as a thread that waits for a core."""
    with Neighbour(guarded.port, guarded.pid) as neighbour:
        guarded.signal(signal.SIGSTOP)
        time.sleep(0.2)
        guarded.signal(signal.SIGCONT)
    assert neighbour.slowest > 0.1


def at_once(port: int, count: int, data: bytes, made: Callable[[int], socket.socket] = dial) -> None:
    """Several connections send the same data, read for one second, and leave."""

    def write() -> None:
        with contextlib.suppress(OSError), contextlib.closing(made(port)) as link:
            link.settimeout(3)
            link.sendall(data)
            ends = time.monotonic() + 1
            while link.recv(1 << 20) and time.monotonic() < ends:
                pass

    threads = [threading.Thread(target=write, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_s11_pipelined_requests_enter_as_a_crowd_does(guarded):
    """256 KB of requests without a key in each of 20 reads."""
    flood = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9000
    with peak(guarded.pid) as memory, Neighbour(guarded.port, guarded.pid) as neighbour:
        at_once(guarded.port, 20, flood)
    print(f"gap {neighbour.slowest:.3f} s, {memory.grown / MIB:.0f} MiB")
    assert neighbour.slowest < GAP_S
    assert memory.grown < 64 * MIB


def test_pipelined_requests_are_all_answered_in_order(guarded):
    names = [b"%d" % at for at in range(200)]
    with dial(guarded.port) as link:
        link.sendall(b"".join(GET.replace(b"\r\n\r\n", b"\r\nX-Request-Id: " + name + b"\r\n\r\n") for name in names))
        data = b""
        while data.count(b"x-request-id: ") < len(names):
            piece = link.recv(1 << 20)
            assert piece, "closed before all were answered"
            data += piece
    assert [part.split(b"\r\n")[0] for part in data.split(b"x-request-id: ")[1:]] == names


FLOODS = {
    "ping": frame(9) * 42_000,
    "pong": frame(10) * 42_000,
    "empty fragments": frame(1, b"{", last=False) + frame(0, last=False) * 42_000,
    "fragments of a byte": frame(1, b"{", last=False) + frame(0, b" ", last=False) * 36_000,
}


@pytest.mark.parametrize("kind", FLOODS)
def test_s11_frames_without_end_close_their_socket(guarded, kind):
    with peak(guarded.pid) as memory, Neighbour(guarded.port, guarded.pid) as neighbour:
        at_once(guarded.port, 8, FLOODS[kind], lambda port: open_socket(port, KEY))
        link = open_socket(guarded.port, KEY)
        link.sendall(FLOODS[kind][:40_000])
        code = closing_code(link)
        link.close()
    print(f"{kind}: gap {neighbour.slowest:.3f} s, {memory.grown / MIB:.0f} MiB, code {code}")
    assert neighbour.slowest < GAP_S
    assert memory.grown < 64 * MIB
    assert code in (0, 1008), "0: the reset came before the frame was read"


def test_a_socket_that_pings_now_and_then_goes_on(guarded):
    with open_socket(guarded.port, KEY) as link:
        for _ in range(100):
            link.sendall(frame(9, b"a"))
        link.sendall(frame(1, b'{"type": "nothing"}'))
        data = b""
        while b"unknown_event" not in data:
            piece = link.recv(65536)
            assert piece, "closed"
            data += piece
        assert data.count(b"\x8a\x01a") == 100


# -- late bytes


def with_trailers(trailers: bytes) -> tuple[int, bytes]:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"prompt": "a"}'
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)


LATE = (KEY.encode(), b"X-Api-Key: right\r\n", b"X-Request-Id: late\r\nX-Forwarded-For: 1.2.3.4\r\nHost: other\r\n")


@pytest.mark.parametrize("trailers", LATE)
def test_s01_trailers_are_no_headers(guarded, trailers):
    with dial(guarded.port) as link:
        link.sendall(with_trailers(trailers) + GET)
        status, content = answer(link)
    assert (status, b"invalid_api_key" in content) == (401, True)


def test_s01_trailers_are_bounded_as_headers_are(guarded):
    for trailers in (b"a: b\r\n" * 200, b"a: " + b"b" * 20_000 + b"\r\n"):
        with dial(guarded.port) as link:
            link.sendall(with_trailers(trailers))
            assert closed_within(link, 10)
    assert ask(guarded.port, "GET", "/version")[0] == 200


def test_s01_a_request_is_not_cut_off_by_the_head_behind_it(guarded):
    """A read ends inside a second head: the limit of that head does not count the first request's bytes."""
    body = b'{"prompt": "a"%b}' % (b" " * 40_000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + KEY.encode()
    post = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with dial(guarded.port) as link:
        link.sendall(post + post[:30])
        assert answer(link)[0] == 200
        link.sendall(post[30:])
        assert answer(link)[0] == 200


def test_s01_a_head_without_end_is_refused(guarded):
    for data in (b"GET /" + b"a" * 30_000, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000):
        with dial(guarded.port) as link:
            link.sendall(data)
            assert answer(link)[0] == 431


# -- keys


def test_s02_a_key_inherits_nothing_when_another_one_goes(guarded, keys):
    """The second key moves to the line of the removed first key."""
    sent = {"model": "tiny", "input": "a secret", "max_output_tokens": 1}
    status, content = ask(guarded.port, "POST", "/v1/responses", sent, "X-Api-Key: first\r\n")
    assert status == 200
    path = f"/v1/responses/{json.loads(content)['id']}"
    assert ask(guarded.port, "GET", path, headers="X-Api-Key: first\r\n")[0] == 200
    keys.write_text("second\nright\n")
    guarded.signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while ask(guarded.port, "GET", path, headers="X-Api-Key: first\r\n")[0] != 401:
        assert time.monotonic() < deadline, "the file is not read again"
    for more in ("", "/input_items"):
        assert ask(guarded.port, "GET", path + more, headers="X-Api-Key: second\r\n")[0] == 404
