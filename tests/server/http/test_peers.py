"""Old and careful peers over sockets: idle connections, HTTP/1.0, HEAD and OPTIONS, prefixes that proxies keep."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true}'


class Wire:
    """A client's plain connection."""

    def __init__(self, url: str) -> None:
        self.where = urlsplit(url)

    async def __aenter__(self) -> Wire:
        self.reader, self.writer = await asyncio.open_connection(self.where.hostname, self.where.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def ask(self, request: bytes) -> bytes:
        """Send a request without a body in its answer; returns the answer's head."""
        self.writer.write(request)
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)

    async def ended(self) -> bytes:
        """Everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), 20)


async def test_the_answer_says_how_long_an_idle_connection_stays_open(serve):
    async with listening(serve()) as url, Wire(url) as wire:
        assert b"\r\nkeep-alive: timeout=120\r\n" in await wire.ask(HEALTH)
        assert b"200 OK" in await wire.ask(HEALTH)
        closing = await wire.ask(HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert b"keep-alive:" not in closing
        assert await wire.ended() == b""
    async with listening(serve(limits={"keepalive_timeout": 1.0})) as url, Wire(url) as wire:
        assert b"\r\nkeep-alive: timeout=1\r\n" in await wire.ask(HEALTH)
        assert await wire.ended() == b""


async def test_the_longest_idle_connection_makes_room_for_a_new_one(serve):
    client = serve(limits={"max_connections": 3, "trust_clients": True})
    async with listening(client) as url, Wire(url) as first, Wire(url) as second, Wire(url) as third:
        for wire in (first, second, third, first):  # the second is the longest idle one
            assert b"200 OK" in await wire.ask(HEALTH)
        async with Wire(url) as fourth:
            assert b"200 OK" in await fourth.ask(HEALTH)
            assert await second.ended() == b""
            for wire in (first, third):
                wire.writer.write(HEALTH[:20])  # in a head, so no longer idle
            await asyncio.sleep(0)
            async with Wire(url) as fifth:
                assert b"200 OK" in await fifth.ask(HEALTH)
                assert await fourth.ended() == b""
                fifth.writer.write(HEALTH[:20])
                async with Wire(url) as sixth:
                    assert b"503" in (await sixth.ended()).split(b"\r\n")[0]
            for wire in (first, third):
                assert b"200 OK" in await wire.ask(HEALTH[20:])


async def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(client):
    head = b"POST /v1/chat/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with listening(client) as url:
        async with Wire(url) as wire:
            wire.writer.write(head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            head, _, body = (await wire.ended()).partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        events = body.split(b"\n\n")
        assert all(event.startswith((b"data: ", b":")) or not event for event in events), body
        assert events[-2] == b"data: [DONE]"
        async with Wire(url) as wire:
            wire.writer.write(b"GET /v1/models HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n\r\n")
            answer = await wire.ended()
        assert b"content-length: " in answer
        assert answer.endswith(b"}")


async def test_a_connection_without_a_byte_is_closed_without_an_answer(serve):
    async with listening(serve(limits={"header_timeout": 0.2})) as url, Wire(url) as wire:
        assert await wire.ended() == b""


PATHS = ("/health", "/ping", "/", "/v1/models", "/version", "/metrics", "/load", "/openapi.json", "/tokenizer_info")


async def test_head_and_options_are_answered_everywhere(client):
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        for path in PATHS:
            whole, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert (await http.options(path)).status_code == 200
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/realtime"):
            assert (await http.options(path)).status_code == 200


async def test_a_prefix_that_a_proxy_keeps_is_answered(serve):
    client = serve(server={"root_path": "/llm", "api_key": ("secret",)})
    key = {"authorization": "Bearer secret"}
    async with listening(client) as url, httpx.AsyncClient(base_url=url) as http:
        codes = {}
        for path in ("/health", "/llm/health", "/v1/models", "/llm/v1/models", "/llmv1/models", "/llm//v1/models"):
            codes[path] = ((await http.get(path)).status_code, (await http.get(path, headers=key)).status_code)
        assert codes.pop("/health") == codes.pop("/llm/health") == (200, 200)
        assert codes.pop("/v1/models") == codes.pop("/llm/v1/models") == (401, 200)
        assert codes == {"/llmv1/models": (401, 404), "/llm//v1/models": (401, 404)}
        assert (await http.get("/llm/")).status_code == (await http.get("/")).status_code
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
        reply = await http.post("/llm/v1/chat/completions", json=body, headers=key)
        assert reply.text.endswith("data: [DONE]\n\n")
