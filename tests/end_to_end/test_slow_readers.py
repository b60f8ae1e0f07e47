"""A reader that stops pauses only its own stream. Reading again, it receives everything; else it is disconnected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from statistics import quantiles
from typing import Any

import pytest

from server.http import flow
from tests import tiny
from tests.end_to_end.inside import InsideServer, held, inside
from tests.end_to_end.process import SMALL
from tests.end_to_end.wire import greedy, request_bytes, stream

STALL_S = 1.5
PATIENT = ("--max-logprobs", "80", "--stream-stall-timeout", str(STALL_S), "--stream-buffer-bytes", str(1 << 30))


@pytest.fixture(scope="module")
def server() -> Iterator[InsideServer]:
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *PATIENT) as server:
        yield server


def wide(max_tokens: int) -> dict[str, Any]:
    """A request with about 50 KB per step (eight choices, many log-probabilities): sockets are soon full."""
    return greedy("the cat", max_tokens, n=8, logprobs=80, stream=True)


class Reader:
    """A raw client with a small receive buffer, which reads only in `read`."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.data = bytearray()

    async def send(self, body: dict[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, request_bytes("POST", "/v1/completions", body))

    async def read(self, until: bytes = b"", seconds: float = 30.0) -> str:
        """Reads, and returns how the reading ended: "found", "closed" or "reset"."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            while not until or until not in self.data[-200:]:
                try:
                    piece = await loop.sock_recv(self.socket, 1 << 20)
                except ConnectionError:
                    return "reset"
                if not piece:
                    return "closed"
                self.data += piece
        return "found"

    def events(self) -> list[Any]:
        """The events of a chunked body; chunks may end inside an event."""
        head, _, rest = bytes(self.data).partition(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0]
        body = bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        found = [block.removeprefix(b"data: ") for block in bytes(body).split(b"\n\n") if block]
        return [json.loads(text) for text in found if text != b"[DONE]"]


@contextlib.asynccontextmanager
async def reader_of(port: int) -> AsyncIterator[Reader]:
    reader = Reader(port)
    try:
        yield reader
    finally:
        reader.socket.close()


def tokens(events: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


async def clean(server: InsideServer, seconds: float = 3.0) -> dict[str, int]:
    """The resources still held after at most `seconds`."""
    for _ in range(int(seconds / 0.05)):
        left = held(await asyncio.to_thread(server.ledger))
        if not left:
            break
        await asyncio.sleep(0.05)
    return left


async def test_a_reader_that_comes_back_gets_everything(server, monkeypatch):
    full, watch = threading.Event(), flow.Reader.watch

    def watched(self: flow.Reader) -> None:
        full.set()
        watch(self)

    monkeypatch.setattr(flow.Reader, "watch", watched)
    async with reader_of(server.port) as quick, reader_of(server.port) as slow:
        await quick.send(wide(200))
        assert await quick.read(until=b"[DONE]") == "found"
        full.clear()
        await slow.send(wide(200))
        assert await slow.read(until=b"data: ") == "found"
        assert await asyncio.to_thread(full.wait, 30), "sockets are never full"
        await asyncio.sleep(STALL_S / 2)
        assert await slow.read(until=b"[DONE]") == "found"
    wanted = tokens(quick.events())
    assert {index: len(ids) for index, ids in wanted.items()} == dict.fromkeys(range(8), 200)
    assert tokens(slow.events()) == wanted
    longest = max(len(choice["token_ids"]) for event in slow.events() for choice in event["choices"])
    assert longest > 1, "what waited is merged"


async def test_a_reader_that_stays_away_is_cut_off_and_no_other_client_waits(server):
    alone = await stream(server.port, "/v1/completions", greedy("the hat", 1000))
    async with reader_of(server.port) as stalled:
        await stalled.send(wide(600))
        assert await stalled.read(until=b"data: ") == "found"
        begun = time.monotonic()
        beside: list[float] = []
        while held(await asyncio.to_thread(server.ledger)):
            got = await stream(server.port, "/v1/completions", greedy("the hat", 1000))
            assert got.token_ids == alone.token_ids
            beside += got.gaps
            assert time.monotonic() - begun < STALL_S + 15, "it is still waited for"
        took = time.monotonic() - begun
        assert await stalled.read() in ("reset", "closed")
    assert b"[DONE]" not in stalled.data[-200:]
    longest = max(beside)
    p99 = quantiles(beside, n=100)[98]
    print(f"cut off after {took:.1f} s; gaps beside it: p99 {p99 * 1e3:.1f} ms, longest {longest * 1e3:.0f} ms")
    assert took >= STALL_S * 0.9
    assert longest < STALL_S / 2, "nobody waits for a reader that has stopped"
    assert await clean(server) == {}


async def test_buffers_for_a_stopped_reader_are_bounded():
    flags = ("--max-logprobs", "80", "--stream-stall-timeout", "60", "--stream-buffer-bytes", "65536")
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *flags) as server:
        async with reader_of(server.port) as stalled:
            await stalled.send(wide(600))
            assert await stalled.read(until=b"data: ") == "found"
            assert await clean(server, 20) == {}, "long before the stall timeout"
            assert await stalled.read() in ("reset", "closed")
        assert b"[DONE]" not in stalled.data[-200:]


async def test_a_body_that_trickles_is_cut_off_while_a_stream_runs_undisturbed():
    flags = ("--body-idle-timeout", "0.5", "--header-timeout", "0.5")
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *flags) as server:
        data = request_bytes("POST", "/v1/completions", greedy())
        head = data.index(b"\r\n\r\n") + 4

        async def trickle(cut: int) -> Reader:
            async with reader_of(server.port) as reader:
                await asyncio.get_running_loop().sock_sendall(reader.socket, data[:cut])
                begun = time.monotonic()
                await reader.read(until=b"upload_timeout", seconds=15)
                assert 0.4 < time.monotonic() - begun < 8  # the defaults are ten and fifteen
                return reader

        slow = asyncio.gather(*[trickle(cut) for cut in [10, head - 2, head, head + 5] * 10])
        beside = await stream(server.port, "/v1/completions", greedy("the hat", 1000))
        for reader in await slow:
            assert reader.data.startswith(b"HTTP/1.1 408"), bytes(reader.data[:100])
        assert beside.done
        assert await clean(server) == {}
