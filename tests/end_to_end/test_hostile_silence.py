"""Clients that take buffers or sessions and fall silent: other clients still get room, and silent clients time out.

They send bodies that stop a byte before their end, bodies that arrive one byte at a time, or only answer pings.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests import tiny
from tests.end_to_end.hostile import MIB, answer, ask, dial, frame, open_socket
from tests.end_to_end.process import SMALL, ServerProcess, serving

ALICE, BOB = "X-Api-Key: one\r\n", "X-Api-Key: two\r\n"
IDLE_S = 1.5
GOING_AWAY = b"\x88\x02\x03\xe9"  # the frame that closes a socket with code 1001
LARGE = b'{"prompt": "a"%b}' % (b" " * 120_000)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:one\nbob:two\n")
    flags = ("--api-key-file", str(keys), "--body-budget-bytes", "4M", "--body-idle-timeout", str(IDLE_S))
    flags += ("--realtime-idle-timeout", str(IDLE_S), "--max-realtime-sessions", "8")
    with serving("--model", str(tiny.checkpoint("omni")), *SMALL, *flags) as started:
        yield started


def upload(port: int, size: int, sent: int, path: str = "/tokenize") -> socket.socket:
    """Sends only the beginning of a body."""
    link = dial(port)
    kind = "Content-Type: application/json\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{ALICE}{kind}Content-Length: {size}\r\n\r\n"
    link.sendall(head.encode() + b'{"prompt": "a"' + b" " * (sent - 14))
    return link


def test_s04_uploads_that_stop_leave_room_for_others(process):
    links = [upload(process.port, MIB, MIB - 1) for _ in range(6)]
    try:
        refused = [link for link in links if is_answered(link)]
        assert 1 <= len(refused) < len(links), "a client does not get everything"
        for _ in range(3):
            assert ask(process.port, "POST", "/tokenize", LARGE, BOB)[0] == 200
        assert ask(process.port, "POST", "/tokenize", LARGE[:1000] + b"}", ALICE)[0] in (200, 400), "small ones always"
        link = dial(process.port)
        assert ask(process.port, "POST", "/tokenize", b'{"prompt": "a"}', ALICE)[0] == 200
        link.close()
        for link in links:
            if link not in refused:
                assert answer(link)[0] == 408
    finally:
        for link in links:
            link.close()
    assert ask(process.port, "POST", "/tokenize", LARGE, ALICE)[0] == 200, "what was held is free again"


def is_answered(link: socket.socket) -> bool:
    """Whether the server refused the request while its body was still arriving."""
    link.settimeout(0.3)
    try:
        return link.recv(12, socket.MSG_PEEK).startswith(b"HTTP/1.1 429")
    except TimeoutError:
        return False
    finally:
        link.settimeout(20)


def test_s11_a_body_that_drips_at_its_end_is_not_waited_for(process):
    """Bytes that arrived quickly allow for one pause, not for hours of pauses."""
    link = upload(process.port, MIB, MIB - 100)
    begun = time.monotonic()
    link.settimeout(IDLE_S / 3)
    data = b""
    while not data:
        assert time.monotonic() - begun < 10 * IDLE_S, "it drips on"
        link.sendall(b" ")
        with contextlib.suppress(TimeoutError):
            data = link.recv(65536)
    assert data.startswith(b"HTTP/1.1 408")
    link.close()


def append(size: int) -> bytes:
    sound = base64.b64encode(bytes(size)).decode()
    return frame(1, json.dumps({"type": "input_audio_buffer.append", "audio": sound}).encode())


def session(port: int, key: str) -> socket.socket:
    """A session in which the client commits, so that audio stays in the buffer."""
    link = open_socket(port, key)
    update = {"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}}
    link.sendall(frame(1, json.dumps(update).encode()))
    data = b""
    while b"session.updated" not in data:
        data += link.recv(65536)
    return link


def test_s42_silent_sessions_leave_room_and_end(process):
    links = [session(process.port, ALICE) for _ in range(4)]
    try:
        for link in links:
            link.sendall(append(MIB))
        assert ask(process.port, "POST", "/tokenize", LARGE, BOB)[0] == 200
        begun = time.monotonic()
        for link in links:
            data = b""
            while not data.endswith(GOING_AWAY):
                piece = link.recv(65536)
                assert piece, data
                data += piece
            assert b"session_idle" in data
        assert time.monotonic() - begun < 20 * IDLE_S
    finally:
        for link in links:
            link.close()
    assert ask(process.port, "POST", "/tokenize", LARGE, ALICE)[0] == 200


def test_s42_sessions_have_places(process):
    """One client opens as many sessions as it may; another client can still open one."""
    links: list[socket.socket] = []
    try:
        with contextlib.suppress(AssertionError):
            while len(links) < 8:
                links.append(open_socket(process.port, ALICE))
        assert 4 < len(links) < 8
        links.append(open_socket(process.port, BOB))
    finally:
        for link in links:
            link.close()
