"""A server on a GPU, over sockets: known answers, alone and with other requests; leaving clients; a clean end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch

from tests import tiny
from tests.end_to_end.process import SMALL, ServerProcess
from tests.end_to_end.test_disconnects import until_idle
from tests.end_to_end.wire import Connection, Stream, ask, greedy, read_events, request_bytes, stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
PROMPTS = [[5 + number, *range(20, 30 + 7 * number)] for number in range(12)]


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    """The tiny omni model, in the mode in which other requests do not change an answer."""
    flags = ("--model", str(tiny.checkpoint("omni")), "--device", "cuda", "--dtype", "float32", "--deterministic")
    flags += ("--gpu-memory-utilization", "0.98")  # another test's server may hold the default, 0.92
    process = ServerProcess(*flags, *SMALL).spawn()
    try:
        yield process.wait_ready(180)
        process.stop()
    finally:
        process.close()


async def alone(port: int) -> list[list[int]]:
    return [(await stream(port, "/v1/completions", greedy(prompt, 40))).token_ids for prompt in PROMPTS]


async def test_streams_and_whole_answers_are_the_same_in_company(process):
    wanted = await alone(process.port)
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS)

    async def whole(prompt: list[int]) -> list[int]:
        reply = await ask(process.port, "POST", "/v1/completions", greedy(prompt, 40))
        assert reply.status == 200, reply.content
        return reply.json()["choices"][0]["token_ids"]

    streams = [stream(process.port, "/v1/completions", greedy(prompt, 40)) for prompt in PROMPTS * 4]
    got = await asyncio.gather(*streams, *[whole(prompt) for prompt in PROMPTS])
    assert [each.token_ids for each in got[:48]] == wanted * 4
    assert got[48:] == wanted


async def test_chat_with_a_picture(process):
    pytest.importorskip("PIL")
    from tests.mm.made import data_url, noise, picture

    url = data_url(picture(noise(90, 120, 1), "PNG"), "image/png")
    parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    reply = await ask(process.port, "POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.content
    said = reply.json()["choices"][0]["message"]["content"]
    assert (await stream(process.port, "/v1/chat/completions", body)).text == said


async def test_three_hundred_requests_with_a_third_leaving(process):
    port, draw = process.port, random.Random(1)
    wanted = await alone(port)
    await until_idle(port)
    threads = process.threads()
    places = asyncio.Semaphore(48)
    wrong: list[object] = []

    async def one(number: int) -> None:
        async with places, Connection(port) as connection:
            prompt = number % len(PROMPTS)
            await connection.send(request_bytes("POST", "/v1/completions", greedy(PROMPTS[prompt], 40, stream=True)))
            if number % 3 == 0:
                await read_events(connection, Stream(), until=draw.randint(1, 10))
                connection.reset()
                return
            got = await read_events(connection, Stream())
            if got.token_ids != wanted[prompt]:
                wrong.append((number, got.status, got.error, got.token_ids))

    await asyncio.gather(*[one(number) for number in range(300)])
    assert wrong == []
    assert set((await until_idle(port)).values()) == {0.0}
    assert process.threads() <= threads + 1
    assert process.children() == []
