"""Requests that offer an upgrade to another protocol, as Java's client sends, are answered as plain requests."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.server.live import listening

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = orjson.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
NEXT = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


async def answers(url: str, *pieces: bytes) -> list[bytes]:
    """Status lines and bodies of two answers, after sending the pieces one after another."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    found = []
    try:
        async with asyncio.timeout(60):
            for _ in range(2):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                found += [head.split(b"\r\n")[0], await reader.readexactly(length)]
    finally:
        writer.close()
    return found


def post(body: bytes, more: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + more
    return head + b"Content-Length: %d\r\n\r\n" % len(body)


@pytest.mark.parametrize("more", [OFFER, b"Connection: upgrade\r\nUpgrade: x, y\r\n"])
async def test_an_offer_of_another_protocol_is_passed_over(client, state, more):
    body = BODY.replace(b"tiny", state.names[0].encode())
    async with listening(client) as url:
        whole = await answers(url, post(body, more) + body + NEXT)
        apart = await answers(url, post(body, more), body[:9], body[9:] + NEXT)
        chunks = post(body, more).rpartition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
        in_chunks = await answers(url, chunks + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + NEXT)
        for found in (whole, apart, in_chunks):
            assert found[0] == found[2] == b"http/1.1 200 ok", found
            assert orjson.loads(found[1])["usage"]["completion_tokens"] == 1
            assert b'"version"' in found[3]


async def test_s01_a_body_behind_an_offer_is_no_request(client):
    async with listening(client) as url:
        found = await answers(url, post(NEXT, OFFER), NEXT, NEXT)  # NEXT is the offer's body, then a request of its own
    assert found[0] == b"http/1.1 400 bad request"
    assert b"not valid JSON" in found[1]
    assert b'"version"' in found[3]
