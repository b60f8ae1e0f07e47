"""Requests that arrive at the same time wait at the turnstile, before the parser; none is lost or mixed up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from server.http.turnstile import PER_TURN
from tests.end_to_end.inside import InsideServer, held, inside
from tests.end_to_end.process import SMALL
from tests.end_to_end.wire import greedy, request_bytes

CROWD = 48


@pytest.fixture(scope="module")
def server() -> Iterator[InsideServer]:
    with inside(*SMALL) as server:
        yield server


@pytest.fixture
def clients(server) -> Iterator[list[socket.socket]]:
    """Connections that are open and idle."""
    made = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(CROWD)]
    time.sleep(0.1)
    yield made
    for client in made:
        client.close()


def whole(client: socket.socket) -> dict[str, object]:
    """Reads an answer with a Content-Length; returns its JSON."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += client.recv(1 << 16)
    return json.loads(body)


def numbered(number: int, size: int = 3) -> bytes:
    """A request whose answer repeats its prompt: the number, and padding."""
    body = {**greedy(f"number {number} " + "a" * size, 1), "echo": True}
    return request_bytes("POST", "/v1/completions", body)


def text_of(answer: dict[str, object]) -> str:
    return answer["choices"][0]["text"]  # type: ignore[index]


def test_every_client_of_a_crowd_gets_its_own_answer(server, clients):
    for _ in range(2):  # the second round reuses the connections
        for number, client in enumerate(clients):
            client.sendall(numbered(number))
        for number, client in enumerate(clients):
            assert text_of(whole(client)).startswith(f"number {number} ")


def test_bodies_in_pieces_arrive_whole_in_a_crowd(server, clients):
    """The server stops reading from a waiting connection; later bytes are neither lost nor read twice."""
    requests = [numbered(number, 200_000 if number % 8 == 0 else 3) for number in range(CROWD)]
    for piece in range(64):
        for client, data in zip(clients, requests):
            step = -(-len(data) // 64)
            client.sendall(data[piece * step : (piece + 1) * step])
    for number, client in enumerate(clients):
        answer = whole(client)
        if number % 8:
            assert text_of(answer).startswith(f"number {number} ")
        else:
            assert answer["error"]["reason"] == "context_length_exceeded", answer  # type: ignore[index]


def test_clients_that_leave_while_they_wait_delay_no_others(server, clients):
    assert CROWD > 4 * PER_TURN
    for number, client in enumerate(clients):
        client.sendall(numbered(number))
        if number % 2:
            client.close()
    for number, client in enumerate(clients):
        if number % 2 == 0:
            assert text_of(whole(client)).startswith(f"number {number} ")
    end = time.monotonic() + 10
    while (left := held(server.ledger())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left
