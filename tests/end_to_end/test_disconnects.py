"""Clients that leave at any moment: nothing stays behind, and nobody else gets another answer."""

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
    """Running, waiting and block use as /metrics shows them, and what /load counts."""
    text = (await ask(port, "GET", "/metrics")).content.decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {name: float(re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.M)[1]) for name in names}
    return {**found, "load": float((await ask(port, "GET", "/load")).json()["server_load"])}


async def until_idle(port: int, seconds: float = 5.0) -> dict[str, float]:
    """The gauges once they are all zero, or as they are when the time is over."""
    for _ in range(int(seconds / 0.05)):
        found = await gauges(port)
        if not any(found.values()):
            break
        await asyncio.sleep(0.05)
    return found


async def test_2000_requests_with_a_fifth_leaving_leak_nothing(server_process: ServerProcess, known):
    port = server_process.port
    await crowd(port, known, 150, SEED - 1)  # every pool thread and lazy import is there
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
    await asyncio.sleep(0.3)
    ledger = server.ledger()
    assert held(ledger) == {}, ledger
    assert ledger["engine_free"] + ledger["engine_cached"] == ledger["engine_total"]
    media = {name: count for name, count in ledger.items() if name.startswith("media_")}
    assert {name for name, count in media.items() if count} <= {"media_cache_bytes"}
    assert "media_reserved_bytes" in media
    assert server.tasks() == tasks
    assert threading.active_count() == threads
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert server.state.live == {}


async def test_blocks_are_free_one_step_after_the_client_has_left(server: InsideServer, known):
    """Counted in steps from the moment the loop knows, with another stream that keeps the steps going."""
    engine = server.state.engine
    steps: list[tuple[int, int]] = []  # (blocks used, streams that the loop knows) after each step
    metrics = engine.on_step

    def note(stats) -> None:
        metrics(stats)
        steps.append((stats.blocks_used, len({id(stream) for stream, _ in engine._routes.values()})))

    prompt = known["text"].prompt_token_ids
    engine.on_step = note
    try:
        async with Connection(server.port) as stays, Connection(server.port) as leaves:
            await stays.send(request_bytes("POST", "/v1/completions", greedy(prompt, 1200, stream=True)))
            steady = await read_events(stays, Stream(), until=5)
            await leaves.send(request_bytes("POST", "/v1/completions", greedy([9] * 600, 1000, n=4, stream=True)))
            await read_events(leaves, Stream(), until=20)
            leaves.reset()
            steady = await read_events(stays, steady)
    finally:
        engine.on_step = metrics
    assert len(steady.token_ids) == 1200
    most = max(used for used, _ in steps)
    both = max(at for at, (_, streams) in enumerate(steps) if streams == 2)
    freed = next(at for at in range(both, len(steps)) if steps[at][0] < most // 2)
    print(f"{most} blocks; freed {freed - both} steps after the last one at which the loop held the stream")
    assert freed - both <= 2, "two steps are in flight: the row costs no more than those"
    assert steps[-1][1] <= 1


async def test_leaving_while_waiting_for_a_place_gives_the_place_back(server: InsideServer):
    """More choices than rows: those that wait leave too, before they have run."""
    bodies = [greedy([9] * 40, 300, n=16, stream=True) for _ in range(12)]  # 192 choices, 64 rows
    connections = [Connection(server.port) for _ in bodies]
    for connection, body in zip(connections, bodies):
        await connection.__aenter__()
        await connection.send(request_bytes("POST", "/v1/completions", body))
    await asyncio.sleep(0.3)
    assert (await gauges(server.port))["num_requests_waiting"] > 0
    for connection in connections:
        connection.reset()
        await connection.__aexit__()
    assert set((await until_idle(server.port, 2.0)).values()) == {0.0}
    assert held(server.ledger()) == {}
