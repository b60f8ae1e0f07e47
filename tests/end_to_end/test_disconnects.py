"""Clients that leave at any moment leave no resource held and do not change other clients' answers."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
from collections.abc import Iterator

import pytest

from tests import tiny
from tests.end_to_end.inside import InsideServer, held, inside
from tests.end_to_end.leavers import crowd
from tests.end_to_end.process import SMALL, ServerProcess
from tests.end_to_end.wire import Connection, Stream, ask, greedy, read_events, request_bytes

SEED = 20260


async def gauges(port: int) -> dict[str, float]:
    """Running and waiting requests and block use in /metrics, and the count in /load."""
    text = (await ask(port, "GET", "/metrics")).content.decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {name: float(re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.M)[1]) for name in names}
    return {**found, "load": float((await ask(port, "GET", "/load")).json()["server_load"])}


async def until_idle(port: int, seconds: float = 5.0) -> dict[str, float]:
    """The gauges once all are zero, or their last values after `seconds`."""
    for _ in range(int(seconds / 0.05)):
        found = await gauges(port)
        if not any(found.values()):
            break
        await asyncio.sleep(0.05)
    return found


async def test_2000_requests_with_a_fifth_leaving_leak_nothing(server_process: ServerProcess, known):
    port = server_process.port
    await crowd(port, known, 150, SEED - 1)  # starts every pool thread and does every lazy import
    await until_idle(port)
    await asyncio.sleep(0.3)
    before = (server_process.descriptors(), server_process.threads(), server_process.children())
    begun = time.perf_counter()
    tally = await crowd(port, known, 2000, SEED)
    took = time.perf_counter() - begun
    assert tally.wrong == []
    left = 2000 - tally.ways["stays"]
    print(f"2,000 requests, {left} left ({dict(tally.ways)}), {took:.1f} s")
    assert 300 < left < 500
    assert set((await until_idle(port)).values()) == {0.0}
    for _ in range(50):
        after = (server_process.descriptors(), server_process.threads(), server_process.children())
        if after == before:
            break
        await asyncio.sleep(0.1)
    assert after == before
    server_process.check_log()


async def left_behind(server: InsideServer) -> dict[str, int]:
    """The resources still held: the device thread releases them a little after the gauges are zero."""
    for _ in range(200):
        if not (found := held(server.ledger())):
            break
        await asyncio.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[InsideServer]:
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL) as server:
        yield server


async def test_the_ledger_is_clean_after_leavers_of_every_kind(server: InsideServer, known):
    await crowd(server.port, known, 100, SEED + 1, share=0.5)
    await until_idle(server.port)
    gc.collect()
    tasks, threads = server.tasks(), threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    tally = await crowd(server.port, known, 400, SEED + 2, share=0.5)
    assert tally.wrong == []
    assert set((await until_idle(server.port)).values()) == {0.0}
    assert await left_behind(server) == {}
    ledger = server.ledger()
    assert ledger["engine_free"] + ledger["engine_cached"] == ledger["engine_total"]
    media = {name: count for name, count in ledger.items() if name.startswith("media_")}
    assert {name for name, count in media.items() if count} <= {"media_cache_bytes"}
    assert "media_reserved_bytes" in media
    for _ in range(100):  # connections closed by RST end in later iterations of the loop
        gc.collect()
        now = (server.tasks(), threading.active_count(), len(os.listdir("/proc/self/fd")))
        if now == (tasks, threads, descriptors):
            break
        await asyncio.sleep(0.1)
    assert now == (tasks, threads, descriptors)
    assert server.state.live == {}


async def test_blocks_are_free_one_step_after_the_client_has_left(server: InsideServer, known):
    """Counts device steps after the loop's abort; another stream keeps the steps going.

    Step outputs received by the loop cannot be counted: a late loop receives many steps that ran before its abort.
    """
    engine = server.state.engine
    device, metrics = engine.inspect(), engine.on_step
    abort, scheduler = device.abort, device.runtime.scheduler
    steps: list[tuple[int, int]] = []  # (number, blocks used after it)
    words: list[int] = []  # number of the next step when the device thread received a choice's abort

    def note(stats) -> None:
        metrics(stats)
        steps.append((stats.step_id, stats.blocks_used))

    def leave(device_id: int) -> None:
        abort(device_id)
        words.append(scheduler.next_step)

    prompt = known["text"].prompt_token_ids
    engine.on_step, device.abort = note, leave
    try:
        async with Connection(server.port) as stays, Connection(server.port) as leaves:
            await stays.send(request_bytes("POST", "/v1/completions", greedy(prompt, 1200, stream=True)))
            steady = await read_events(stays, Stream(), until=5)
            await leaves.send(request_bytes("POST", "/v1/completions", greedy([9] * 600, 1000, n=4, stream=True)))
            await read_events(leaves, Stream(), until=20)
            leaves.reset()
            steady = await read_events(stays, steady)
    finally:
        engine.on_step, device.abort = metrics, abort
    assert len(steady.token_ids) == 1200
    assert len(words) == 4
    most, peak = max((used, number) for number, used in steps if number < words[-1])
    freed = next(number for number, used in steps if number > peak and used < most // 2)
    print(f"{most} blocks; freed by step {freed}, {words[-1]} was next when the last choice left")
    assert freed - words[-1] <= 1, "two steps are in flight: the row costs no more than those"


async def test_leaving_while_waiting_for_a_place_gives_the_place_back(server: InsideServer):
    """There are more choices than rows: clients whose choices still wait leave too."""
    bodies = [greedy([9] * 40, 300, n=16, stream=True) for _ in range(12)]  # 192 choices, 64 rows
    connections = [Connection(server.port) for _ in bodies]
    for connection, body in zip(connections, bodies):
        await connection.__aenter__()
        await connection.send(request_bytes("POST", "/v1/completions", body))
    async with asyncio.timeout(20):
        while not (await gauges(server.port))["num_requests_waiting"]:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.02)
    for connection in connections:
        connection.reset()
        await connection.__aexit__()
    assert set((await until_idle(server.port)).values()) == {0.0}
    assert await left_behind(server) == {}
