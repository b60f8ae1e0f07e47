"""The server process on real sockets: start, stop, signals, limits below the app, official client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from server.cli import parse
from server.http.listen import BindError, bind

ROOT = Path(__file__).parents[3]
FLAGS = ["--port", "0", "--host", "127.0.0.1", "--num-gpu-blocks-override", "1024", "--num-threads", "1"]


GO_ON = {"ignore_eos": True}


class Server:
    """One process of `python -m server`."""

    def __init__(self, *flags: str, wait: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", *FLAGS, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.where = self.printed = ""
        if wait:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith("Listening on "):
                    self.where = line.removeprefix("Listening on ").strip()
                    break
            if not self.where:
                self.process.kill()
                raise AssertionError(self.process.communicate()[1])

    @property
    def port(self) -> int:
        return int(self.where.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stops the process; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.printed, said = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert "Traceback" not in said or self.process.returncode < 0, said
        return self.process.returncode

    def raw(self, data: bytes, seconds: float = 5.0) -> bytes:
        """Sends bytes; returns all bytes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), seconds) as connection:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(65536):
                found += piece
            return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(
        "--header-timeout", "3", "--max-header-bytes", "2048", "--max-headers", "20", "--max-target-bytes", "256"
    )
    yield running
    assert running.stop() == 0


def chat(text: str = "hi", **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True, **fields}


def request(body: dict[str, object], path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + b"Connection: close\r\n\r\n" + data


def test_the_whole_stream_on_the_wire(server):
    reply = server.raw(request(chat(stream=True)))
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"server:" not in head.lower()
    assert b"x-request-id: " in head
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_s01_header_limits_answer_431_and_close(server):
    long = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 3000 + b"\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: a\r\n" % at for at in range(30)) + b"\r\n"
    target = b"GET /health?" + b"a" * 300 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data in (long, many, target, long[:-4]):
        reply = server.raw(data)
        assert reply.startswith(b"HTTP/1.1 431 "), reply[:80]
        assert b'"reason":"headers_too_large"' in reply
        assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", reply)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
def test_s01_ambiguous_requests_answer_400_and_close(server, data):
    reply = server.raw(data)
    assert reply.startswith(b"HTTP/1.1 400 "), reply[:80]
    assert b'"reason":"invalid_request"' in reply


def test_s11_slow_headers_are_cut_off(server):
    begun = time.monotonic()
    reply = server.raw(b"GET /health HTTP/1.1\r\nHost: loc", seconds=15)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - begun < 8, "after the ten seconds of the default"


def test_a_refused_large_body_is_still_answered(server):
    with httpx.Client(base_url=server.where) as client:
        reply = client.post(
            "/tokenize", content=b"x" * (65 << 20), headers={"content-type": "application/json"}, timeout=20
        )
        assert reply.status_code == 413
        assert client.get("/health").status_code == 200


def test_pipelined_requests_are_answered_in_order(server):
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\n\r\n"
    two = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: b\r\nConnection: close\r\n\r\n"
    reply = server.raw(one + two)
    assert reply.index(b"x-request-id: a") < reply.index(b"x-request-id: b")


def test_a_closed_connection_frees_its_row(server):
    with httpx.Client(base_url=server.where) as client:
        for _ in range(10):
            with client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=4000, ignore_eos=True)
            ) as reply:
                next(reply.iter_bytes())
        end = time.monotonic() + 20
        while client.get("/load").json()["server_load"] and time.monotonic() < end:
            time.sleep(0.02)
        assert client.get("/load").json() == {"server_load": 0}
        gone = 'num_requests_running{engine="0",model_name="omniloop"} 0.0'
        while gone not in (metrics := client.get("/metrics").text) and time.monotonic() < end:
            time.sleep(0.02)  # until the engine's next report
        assert gone in metrics
        assert 'finished_reason="abort",model_name="omniloop"} 10.0' in metrics


def test_the_openai_client_streams_and_counts(server):
    with openai.OpenAI(base_url=f"{server.where}/v1", api_key="none") as client:
        assert client.models.list().data[0].id == "omniloop"
        assert client.models.retrieve("omniloop").id == "omniloop"
        messages = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(
            model="omniloop", messages=messages, max_tokens=8, logprobs=True, top_logprobs=2, extra_body=GO_ON
        )
        assert whole.usage.completion_tokens == 8
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
        pieces = list(
            client.chat.completions.create(
                model="omniloop",
                messages=messages,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=GO_ON,
            )
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert pieces[-1].usage.completion_tokens == 8
        old = client.completions.create(model="omniloop", prompt=["a", "b"], max_tokens=2, logprobs=1, echo=True)
        assert [choice.index for choice in old.choices] == [0, 1]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="omniloop", messages=messages, temperature=3)


async def test_a_hundred_parallel_streams_of_the_async_client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0) as client:

        async def one(at: int) -> str:
            stream = await client.chat.completions.create(
                model="omniloop",
                messages=[{"role": "user", "content": f"say {at % 7}"}],
                max_tokens=8,
                stream=True,
                temperature=0,
            )
            return "".join([piece.choices[0].delta.content or "" async for piece in stream if piece.choices])

        found = await asyncio.gather(*(one(at) for at in range(100)))
        for at in range(100):
            assert found[at] == found[at % 7]


# -- start and stop


def test_the_first_answer_is_503_and_the_last_state_is_ready():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server("--port", str(port), wait=False)
    try:
        seen = []
        end = time.monotonic() + 60
        while (not seen or seen[-1] != 200) and time.monotonic() < end:
            try:
                reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if not seen or seen[-1] != reply.status_code:
                seen.append(reply.status_code)
            if reply.status_code == 503:
                assert reply.json()["error"]["reason"] == "starting"
                assert reply.headers["retry-after"]
        assert seen == [503, 200]
    finally:
        assert server.stop() == 0


def test_s43_drain_finishes_what_runs():
    server = Server()
    try:
        with (
            httpx.Client(base_url=server.where, timeout=60) as client,
            httpx.Client(base_url=server.where, timeout=60) as other,
            client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=600, ignore_eos=True)
            ) as reply,
        ):
            pieces = reply.iter_bytes()
            first = next(pieces)
            server.process.send_signal(signal.SIGTERM)
            while (refused := other.get("/health")).status_code == 200:
                time.sleep(0.005)
            assert refused.status_code == 503
            assert refused.json()["error"]["reason"] == "draining"
            rest = b"".join(pieces)
        assert (first + rest).endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_s43_a_stream_that_does_not_end_in_time_gets_an_error(how):
    server = Server("--shutdown-timeout", "0.3" if how == "timeout" else "60")
    try:
        with (
            httpx.Client(base_url=server.where, timeout=20) as client,
            client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=8000, ignore_eos=True)
            ) as reply,
        ):
            pieces = reply.iter_bytes()
            next(pieces)
            server.process.send_signal(signal.SIGTERM)
            if how == "second signal":
                time.sleep(0.2)
                server.process.send_signal(signal.SIGINT)
            rest = b"".join(pieces)
        assert b'"reason":"draining"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
    finally:
        assert server.stop() == 0


def test_a_signal_during_start_up_ends_it():
    for seconds in (0.3, 0.6):
        for _ in range(4):  # on a busy machine the test may wake up late, when the server is ready
            server = Server(wait=False)
            time.sleep(seconds)
            status = server.stop(signal.SIGINT)
            assert status in (0, -signal.SIGINT, 130)  # the interpreter's own handler runs before ours is set
            if "Listening on" not in server.printed:
                break
        else:
            raise AssertionError("it went on as if nobody had asked")


def test_unix_sockets(tmp_path):
    path = str(tmp_path / "s")
    server = Server("--uds", path)
    try:
        assert server.where == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            assert client.get("http://localhost/health").status_code == 200
    finally:
        assert server.stop() == 0
    assert not os.path.exists(path)


def test_a_unix_socket_with_a_listener_is_not_taken_away(tmp_path):
    """The socket file of a killed server is replaced."""
    path = str(tmp_path / "s")
    config = parse(["--uds", path])[1]
    with bind(config), pytest.raises(BindError, match=f"cannot listen on {path}: Address already in use"):
        bind(config)
    assert os.path.exists(path)
    bind(config).close()


def test_a_taken_port_and_a_missing_model_end_in_one_line(server):
    for flags, text in [
        (["--port", str(server.port)], "cannot listen on"),
        (["--model", "/nowhere"], "no such folder"),
        (["--model", "/nowhere", "--chat-template", "/no.jinja"], "/no.jinja: is not a readable file"),  # checked first
    ]:
        done = subprocess.run(
            [sys.executable, "-m", "server", *FLAGS, *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        lines = [line for line in done.stderr.splitlines() if "omniloop:" in line]
        assert len(lines) == 1
        assert text in lines[0]


def test_info_names_the_model():
    done = subprocess.run(
        [sys.executable, "-m", "server", "info"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert "Qwen2_5OmniThinkerForConditionalGeneration" in done.stdout
