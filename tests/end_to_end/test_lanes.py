"""Lanes over real sockets: a client receives the same bytes as without lanes, and lanes leave no resource held.

`carried` counts the rows that lanes have written; without lanes every row goes through Delta, frames and transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

import engine.engine
from _fast.lane import deliver
from engine.base.output import StepOutput
from engine.base.request import FinishReason
from engine.base.stats import StepStats
from server.http import line
from tests import tiny
from tests.end_to_end.inside import InsideServer, held, inside
from tests.end_to_end.process import SMALL
from tests.end_to_end.wire import request_bytes

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SAID = [{"role": "user", "content": "hello"}]
LONG = {"max_tokens": 90, "ignore_eos": True, "stream": True}
WARM = {**LONG, "temperature": 1.3, "seed": 3}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "the cat", **WARM}),
    "completion with echo and usage": (
        COMPLETIONS,
        {"prompt": "the cat", **WARM, "echo": True, "stream_options": {"include_usage": True}},
    ),
    "chat": (CHAT, {"messages": SAID, **WARM}),
    "chat with special tokens": (CHAT, {"messages": SAID, **WARM, "skip_special_tokens": False}),
    "chat with running usage": (
        CHAT,
        {"messages": SAID, **WARM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with a stop string": (CHAT, {"messages": SAID, **WARM, "stop": ["e"]}),
    "chat with log-probabilities": (CHAT, {"messages": SAID, **WARM, "logprobs": True}),
    "chat in larger pieces": (CHAT, {"messages": SAID, **WARM, "stream_interval": 4}),
    "messages": (MESSAGES, {"messages": SAID, "max_tokens": 90, "stream": True, "temperature": 0}),
}
PLAIN = {"completion", "completion with echo and usage", "chat", "chat with special tokens", "messages"}
TIMES = re.compile(rb'"created":\d+|date: [^\r]+|"(?:id|msg)":"[^"]+"')


class Carried:
    """Replaces the engine's `deliver` and counts rows; with `lanes` False no row goes through a lane."""

    def __init__(self) -> None:
        self.lanes = True
        self.rows = 0

    def __call__(self, routes: Any, ids: Any, tokens: Any, finishes: Any, start: int, stop: int) -> int:
        if not self.lanes:
            return start
        row = deliver(routes, ids, tokens, finishes, start, stop)
        self.rows += sum(at in routes and routes[at][0].lane is not None for at in ids[start:row])
        return row


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    counted = Carried()
    monkeypatch.setattr(engine.engine, "deliver", counted)
    return counted


@pytest.fixture(scope="module")
def server() -> Iterator[InsideServer]:
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL) as server:
        yield server


def answer(client: socket.socket, request: bytes) -> bytes:
    """The bytes of an answer, as received: in chunks, or to the end of a connection of HTTP/1.0."""
    client.settimeout(30)
    client.sendall(request)
    found, ends = bytearray(), b" HTTP/1.0\r\n" in request
    while not found.endswith(b"\r\n0\r\n\r\n"):
        piece = client.recv(1 << 16)
        if ends and not piece:
            break
        assert piece, bytes(found[-300:])
        found += piece
    return bytes(found)


def clean(server: InsideServer) -> dict[str, int]:
    """The resources still held after a while."""
    end = time.monotonic() + 10
    while (left := held(server.ledger())) and time.monotonic() < end:
        time.sleep(0.02)
    return left


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("kind", BODIES)
def test_the_bytes_are_those_of_the_transport(server, carried, kind, version):
    path, body = BODIES[kind]
    request = request_bytes("POST", path, body, {"X-Request-Id": "mine"})
    request = request.replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1)
    found = []
    with contextlib.ExitStack() as clients:
        for carried.lanes in (False, True, True):
            if not found or version == "1.0":  # HTTP/1.1: all on one connection
                client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            found.append(TIMES.sub(b"", answer(client, request)))
    assert (b"\r\ntransfer-encoding: chunked\r\n" in found[0]) == (version == "1.1")
    same = found
    if "stream_interval" in body:  # tokens per piece depend on how many steps a loop iteration delivers
        same = [b"".join(re.findall(rb'"content":"((?:[^"\\]|\\.)*)"', data)) for data in found]
    assert same[1] == same[0]
    assert same[2] == same[0]
    if kind in PLAIN and version == "1.1":  # lanes write chunks
        assert carried.rows > 20, "of two answers"
    else:
        assert carried.rows == 0
    assert clean(server) == {}


def test_two_choices_share_their_writes_and_no_lane(server, carried):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        got = answer(client, request_bytes("POST", CHAT, {"messages": SAID, **WARM, "n": 2}))
    assert got.count(b'"finish_reason":"length"') == 2
    assert carried.rows == 0


def test_the_official_client_reads_what_a_whole_answer_says(server, carried):
    model = str(tiny.checkpoint("omni"))
    asked: dict[str, Any] = {"model": model, "messages": SAID, "max_tokens": 200, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 200
    assert carried.rows > 100


def test_tls_goes_through_the_transport(carried, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    path, body = BODIES["chat"]
    tls = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *tls) as it:
        with (
            socket.create_connection(("127.0.0.1", it.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            got = answer(client, request_bytes("POST", path, body))
        assert clean(it) == {}
    assert b'"finish_reason":"length"' in got
    assert carried.rows == 0
    assert line.HeaderCase.yes, "this is as it should be, and not told of"


# -- many clients, some of which leave


def texts(data: bytes) -> bytes:
    """The JSON strings of a completion stream, concatenated."""
    return b"".join(re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', data))


def test_a_client_that_gets_a_reused_descriptor_reads_its_own_answer(server, carried):
    """Some clients leave with RST in the middle of an answer; new clients get their descriptors at once."""
    draw = random.Random(7)
    prompts = [f"{number} is a number" for number in range(24)]
    asked = [request_bytes("POST", COMPLETIONS, {"prompt": prompt, **LONG, "temperature": 0}) for prompt in prompts]
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        wanted = [texts(answer(client, request)) for request in asked]
    carried.rows = 0
    stayed = 0
    for _ in range(4):
        clients = []
        for number in [*range(24), *range(24)]:
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(asked[number])
            if draw.random() < 0.4:
                time.sleep(draw.random() * 0.02)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            else:
                clients.append((number, client))
        for number, client in clients:
            with client:
                assert texts(answer(client, b"")) == wanted[number]
            stayed += 1
    assert stayed > 50
    assert carried.rows > stayed * 50
    assert clean(server) == {}


@pytest.mark.parametrize("when", ["before", "between"])
def test_rubbish_behind_a_request_harms_no_other_client(server, carried, caplog, when):
    beside = request_bytes("POST", COMPLETIONS, {"prompt": "the cat", **LONG, "temperature": 0})
    rubbish = request_bytes("POST", COMPLETIONS, {"prompt": "the hat", **LONG, "max_tokens": 900, "temperature": 0})
    finished = server.state.metrics.finished
    before = dict(finished)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        wanted = texts(answer(client, beside))
        with socket.create_connection(("127.0.0.1", server.port)) as rude:
            rude.sendall(rubbish)
            while when == "between" and b"data: " not in rude.recv(1 << 16):
                pass
            rude.sendall(b"\x00\x01 not HTTP\r\n\r\n")
            assert texts(answer(client, beside)) == wanted
            assert clean(server) == {}
            with contextlib.suppress(ConnectionResetError):
                while piece := rude.recv(1 << 16):
                    assert b"finish_reason" not in piece or b'"finish_reason":null' in piece
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "the fault is the client's"
    assert (finished["error"], finished["abort"]) == (before["error"], before["abort"] + 1)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_client_that_leaves_with_a_second_request_pipelined_ends_both(server, caplog, when):
    request = request_bytes("POST", COMPLETIONS, {"prompt": "the hat", **LONG, "max_tokens": 900, "temperature": 0})
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request)
            while when == "between" and b"data: " not in client.recv(1 << 16):
                pass
            client.sendall(request)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert clean(server) == {}
    gc.collect()  # asyncio logs the unretrieved errors of collected tasks
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- slow readers, with steps of made-up tokens


WORDS = "The quick brown fox jumps over the lazy dog, 漢字 and 😀 too.\n" * 40


def step(server: InsideServer, rows: Callable[[], list[tuple[int, int, int]]]) -> None:
    """Passes rows (id, token, finish) to the engine's delivery, as the device thread would."""

    async def report() -> None:
        output = StepOutput(StepStats())
        for row in rows():
            output.add(*row)
        server.state.engine.on_output(output)
        await asyncio.sleep(0)

    server.call(report)


def routes(server: InsideServer, count: int) -> list[int]:
    end = time.monotonic() + 10
    while len(server.state.engine.open_ids()) < count and time.monotonic() < end:
        time.sleep(0.01)
    found = server.state.engine.open_ids()
    assert len(found) == count
    return found


def narrow(server: InsideServer, number: int) -> None:
    """Shrinks the kernel's send buffer of a connection, so that it is full soon."""

    async def narrow() -> None:
        held = server.state.engine._routes[number][0]._callback.func.__self__.exchange.line()
        held.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    server.call(narrow)


def connected(server: InsideServer) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    return client


def there(client: socket.socket, wait: float = 0.001) -> bytes:
    """All bytes that have arrived, or arrive within `wait` seconds."""
    found = bytearray()
    client.settimeout(wait)
    with contextlib.suppress(TimeoutError):
        while piece := client.recv(1 << 16):
            found += piece
    client.settimeout(30)
    return bytes(found)


def test_a_full_socket_pauses_its_stream_and_tokens_stay_in_order_when_it_drains(carried):
    with inside(*SMALL) as server, connected(server) as slow, connected(server) as quick:
        server.call(paused(server))
        ids = server.state.tokenizer.encode(WORDS)
        request = request_bytes("POST", CHAT, {"messages": SAID, **LONG, "max_tokens": 1000})
        slow.sendall(request)
        number = routes(server, 1)[0]
        quick.sendall(request)
        other = routes(server, 2)[1]
        step(server, lambda: [(number, ids[0], 0), (other, ids[0], 0)])
        narrow(server, number)
        heard, ways = b"", []
        for token in ids[1:400]:
            before = carried.rows
            step(server, lambda token=token: [(number, token, 0), (other, token, 0)])
            heard += there(quick)
            ways.append(carried.rows - before)
        assert ways[1] == 2, "both by lane at first"
        assert ways[-1] == 1, "then the slow one's are held"
        slow_heard = there(slow, 1.0)
        before = carried.rows
        for token in ids[400:410]:
            step(server, lambda token=token: [(number, token, 0), (other, token, 0)])
        assert carried.rows - before >= 18, "drained, it is by lane again"
        step(server, lambda: [(at, ids[410], FinishReason.LENGTH) for at in (number, other)])
        said = [spoken(heard + answer(quick, b"")), spoken(slow_heard + answer(slow, b""))]
        wanted = server.state.tokenizer.decode(ids[:411])
        assert said == [wanted, wanted]
        server.call(resumed(server, (number, other)))
        assert clean(server) == {}


def spoken(data: bytes) -> str:
    """The text of a chat stream, whose chunks are parsed strictly."""
    rest = data.partition(b"\r\n\r\n")[2]
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    events = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def paused(server: InsideServer) -> Callable[[], Any]:
    async def pause() -> None:
        server.state.engine.pause()

    return pause


def resumed(server: InsideServer, numbers: tuple[int, ...]) -> Callable[[], Any]:
    """Aborts the requests on the device thread and resumes it: the made-up steps ended them only on the loop."""

    async def resume() -> None:
        for number in numbers:
            server.state.engine.inspect().abort(number)
        server.state.engine.resume()

    return resume


# -- an unknown version of uvicorn


@pytest.fixture
def header_case() -> Iterator[None]:
    yield
    line.HeaderCase.yes = True


def test_a_uvicorn_that_looks_different_is_logged_once(caplog, header_case):
    cycle: Any = SimpleNamespace(response_started=True, chunked_encoding=True, response_complete=False)
    with caplog.at_level(logging.WARNING, logger="omniloop.edge"):
        assert line.line_of(cycle) is None
        assert line.line_of(cycle) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tokens go through the transport" in caplog.text


@pytest.mark.parametrize(
    "state",
    [
        {"response_started": False},
        {"chunked_encoding": False},
        {"response_complete": True},
        {"disconnected": True},
    ],
)
def test_an_answer_that_is_not_being_sent_in_chunks_has_no_line(state):
    cycle: Any = SimpleNamespace(
        response_started=True, chunked_encoding=True, response_complete=False, disconnected=False, transport=None
    )
    vars(cycle).update(state)
    assert line.line_of(cycle) is None
    assert line.HeaderCase.yes
