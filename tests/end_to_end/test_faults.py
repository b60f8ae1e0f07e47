"""A step that fails, a device that is lost, and a device that never answers, over sockets (S38, S40, S41).

The tests check what clients receive, and how the process ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from server.start.process import EXIT_DEAD
from tests import tiny
from tests.end_to_end.faulty import BREAKS_ITS_STEP, LOSES_THE_DEVICE, NEVER_ENDS
from tests.end_to_end.process import SMALL, ServerProcess
from tests.end_to_end.wire import Connection, Reply, Stream, ask, greedy, read_events, request_bytes

PROMPTS = [[5 + number, *range(20, 30 + 7 * number)] for number in range(6)]
EXIT_S = 10.0  # from the fault to the end of the process


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no accelerator")
    return request.param


@contextmanager
def serving_faults(device: str, name: str, *flags: str) -> Iterator[ServerProcess]:
    """A ready server whose steps can fail; the test itself waits for the process to end."""
    named = ("--model", str(tiny.checkpoint(name)), "--device", device, "--dtype", "float32")
    process = ServerProcess(*named, *flags, *SMALL)
    process.command[2] = "tests.end_to_end.faulty"
    try:
        yield process.spawn().wait_ready(180)
    finally:
        process.close()


async def open_stream(port: int, prompt: list[int], tokens: int, begun: asyncio.Event, go_on: asyncio.Event) -> Stream:
    """Reads a stream to its end: sets `begun` at its first tokens, and reads the others after `go_on`."""
    async with Connection(port) as connection:
        await connection.send(request_bytes("POST", "/v1/completions", greedy(prompt, tokens, stream=True)))
        stream = await read_events(connection, Stream(), until=2)
        begun.set()
        await go_on.wait()
        return await read_events(connection, stream)


async def with_fault(port: int, number: int, tokens: int) -> tuple[list[Stream], Reply]:
    """Running streams, and the reply to a prompt that makes one of their steps fail.

    The prompt is sent before the streams are read further: a GPU makes tokens faster than this loop reads them.
    """
    events, go_on = [asyncio.Event() for _ in PROMPTS], asyncio.Event()
    running = [
        asyncio.ensure_future(open_stream(port, prompt, tokens, begun, go_on)) for prompt, begun in zip(PROMPTS, events)
    ]
    for begun in events:
        await begun.wait()
    broken = await ask(port, "POST", "/v1/completions", greedy([number, 7, 9], 8))
    go_on.set()
    return await asyncio.gather(*running), broken


@pytest.fixture
def process(device: str) -> Iterator[ServerProcess]:
    with serving_faults(device, "omni", *(("--deterministic",) if device == "cuda" else ())) as process:
        yield process


async def test_a_failed_step_ends_its_rows_and_a_lost_device_everything(process):
    port = process.port
    wanted = [(await ask(port, "POST", "/v1/completions", greedy(prompt, 60))).json() for prompt in PROMPTS]
    whole = [answer["choices"][0]["token_ids"] for answer in wanted]

    streams, broken = await with_fault(port, BREAKS_ITS_STEP, 60)
    assert (broken.status, broken.error["reason"]) == (500, "internal_error")
    for stream, tokens in zip(streams, whole):
        assert stream.token_ids == tokens[: len(stream.token_ids)]
        assert stream.token_ids == tokens or stream.error["reason"] == "internal_error"
    assert (await ask(port, "GET", "/health")).status == 200
    again = [(await ask(port, "POST", "/v1/completions", greedy(prompt, 60))).json() for prompt in PROMPTS]
    assert [answer["choices"][0]["token_ids"] for answer in again] == whole

    begun = time.monotonic()
    streams, broken = await with_fault(port, LOSES_THE_DEVICE, 1900)
    assert (broken.status, broken.json().get("error", {}).get("reason")) == (503, "engine_dead"), process.log[-6000:]
    for stream, tokens in zip(streams, whole):
        assert stream.error["reason"] == "engine_dead"
        assert stream.done
        assert stream.token_ids[:60] == tokens[: len(stream.token_ids)]
    assert await asyncio.to_thread(process.wait) == EXIT_DEAD, process.log[-6000:]
    assert time.monotonic() - begun < EXIT_S


async def test_a_device_that_never_answers_ends_the_process(device):
    with serving_faults(device, "qwen3", "--step-timeout", "1", "--stall-exit", "0.5") as process:
        assert (await ask(process.port, "POST", "/v1/completions", greedy(PROMPTS[0], 4))).status == 200
        begun = time.monotonic()
        broken = await ask(process.port, "POST", "/v1/completions", greedy([NEVER_ENDS, 7, 9], 8))
        assert (broken.status, broken.error["reason"]) == (503, "engine_dead"), process.log[-6000:]
        assert await asyncio.to_thread(process.wait) == EXIT_DEAD, process.log[-6000:]
        assert 1.0 < time.monotonic() - begun < EXIT_S
