"""Clients leave at every stage of uploads and of requests with new media of every kind: the server retains nothing.

Each request has its own salt, so that each picture, sound and film is decoded, prepared and encoded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from _fast.plan import StepPlan
from engine.step.parts.encoder_cache import EncoderCache
from mm.heap import trim_heap
from server.flags.config import Config
from tests import tiny
from tests.end_to_end.inside import InsideServer, held, inside
from tests.end_to_end.known import data_of
from tests.end_to_end.leavers import STAGES, Tally, crowd, leave
from tests.end_to_end.process import SMALL
from tests.end_to_end.test_disconnects import until_idle
from tests.end_to_end.wire import ask, request_bytes

PATH, BOUNDARY = "/v1/audio/transcriptions", "0b57"
KIND = f"multipart/form-data; boundary={BOUNDARY}"
CACHE = ("--mm-processor-cache-gb", "0.01")  # full after about two hundred requests
GROWTH = 16 << 20  # allowed growth in bytes, outside caches, from the first to the fifth thousand; measured: 8 MiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for temporary files of the server's process."""
    made, before = tmp_path_factory.mktemp("temporary"), (tempfile.tempdir, os.environ.get("TMPDIR"))
    tempfile.tempdir = os.environ["TMPDIR"] = str(made)
    yield made
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[InsideServer]:
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *CACHE) as server:
        yield server


def upload(draw: random.Random) -> bytes:
    """A form with a recording and stream=true."""
    file = data_of(draw.choice(["wav", "mp3"]))[1]
    texts = {"stream": "true", "max_completion_tokens": "8", "cache_salt": f"{draw.getrandbits(63):x}"}
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{text}'.encode() for name, text in texts.items()]
    parts.append(b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + file)
    return b"".join(f"--{BOUNDARY}\r\n".encode() + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


async def uploads(port: int, count: int, seed: int, at_a_time: int = 16) -> Tally:
    """Sends uploads; half of the clients leave."""
    draw, tally, places = random.Random(seed), Tally(), asyncio.Semaphore(at_a_time)

    async def one() -> None:
        body, way = upload(draw), draw.choice(STAGES) if draw.random() < 0.5 else "stays"
        how = "reset" if draw.random() < 0.5 else "close"
        async with places:
            tally.ways[way] += 1
            if way == "stays":
                reply = await ask(port, "POST", PATH, body, kind=KIND)
                if reply.status != 200 or not reply.content.endswith(b"data: [DONE]\n\n"):
                    tally.wrong.append(f"{reply.status} {reply.content[-200:]!r}")
                return
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await leave(port, request_bytes("POST", PATH, body, kind=KIND), way, how, draw.random())

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return tally


async def mixed(server: InsideServer, known, count: int, seed: int) -> None:
    """Sends requests, one fifth of them uploads. Clients that stay get their answers."""
    both = await asyncio.gather(
        crowd(server.port, known, count - count // 5, seed, share=0.5, at_a_time=32, fresh=True),
        uploads(server.port, count // 5, seed),
    )
    for tally in both:
        assert tally.wrong == []
        assert 0 < tally.ways["stays"] < tally.ways.total()
    assert set((await until_idle(server.port, 30)).values()) == {0.0}
    gc.collect()


async def settled(server: InsideServer, before: tuple[int, int, int]) -> None:
    """Waits until tasks, threads and descriptors are as many as before and no resource is held."""
    for _ in range(100):
        now = counted(server)
        if now == before and held(server.ledger()) == {}:
            break
        await asyncio.sleep(0.1)
    assert now == before
    assert held(server.ledger()) == {}


def counted(server: InsideServer) -> tuple[int, int, int]:
    return server.tasks(), threading.active_count(), len(os.listdir("/proc/self/fd"))


def check_caches(server: InsideServer, folder: Path) -> None:
    """The server holds only entries of its caches, within the caches' bounds."""
    ledger, runtime = server.ledger(), server.state.engine.inspect().runtime
    media = {name: count for name, count in ledger.items() if name.startswith("media_") and count}
    assert set(media) <= {"media_cache_bytes"}
    assert media.get("media_cache_bytes", 0) <= server.state.media.limits.mm_processor_cache_gb * 2**30
    encoder, entries = runtime.media.encoder, runtime.scheduler.ledger()["encoder_entries"]
    assert len(encoder.inputs) == len(encoder.entries) == len(encoder.digests) == entries
    assert set(encoder.encoded) | set(encoder.begun) | set(encoder.clock.took) <= set(encoder.inputs)
    assert sum(len(rows) for rows in encoder.encoded.values()) <= runtime.sizes.encoder_rows
    assert list(folder.iterdir()) == [], "a temporary file is left"


def with_caches(server: InsideServer) -> int:
    """Resident bytes of the process, without the allocator's free bytes and the bounded encoder cache."""
    trim_heap()
    encoder = server.state.engine.inspect().runtime.media.encoder
    features = sum(array.nbytes for item in list(encoder.inputs.values()) for array in item.features.values())
    return psutil.Process().memory_info().rss - features - sum(rows.nbytes for rows in encoder.encoded.values())


async def check_leavers(server: InsideServer, known, folder: Path, counts: list[int]) -> list[int]:
    """Checks that each crowd leaves nothing behind; returns the memory outside caches after each crowd."""
    pool = server.state.pool
    all_at_once = threading.Barrier(pool._max_workers)
    list(pool.map(lambda _: all_at_once.wait(60), range(pool._max_workers)))  # starts every thread of the pool
    await mixed(server, known, 60, 1)  # does every lazy import
    await asyncio.sleep(0.3)
    before, sizes = counted(server), []
    for number, count in enumerate(counts):
        await mixed(server, known, count, 2 + number)
        await settled(server, before)
        check_caches(server, folder)
        sizes.append(with_caches(server))
    return sizes


async def test_media_left_at_every_stage_leave_nothing(server: InsideServer, known, folder: Path):
    await check_leavers(server, known, folder, [200])


@pytest.mark.full
async def test_5000_mixed_requests_leave_nothing_and_memory_is_flat(server: InsideServer, known, folder: Path):
    sizes = await check_leavers(server, known, folder, [1000] * 5)
    print("MiB beside caches after each thousand:", [size >> 20 for size in sizes])
    assert sizes[-1] - sizes[0] < GROWTH


@pytest.mark.full
async def test_clients_that_leave_partial_towers_leave_nothing(known, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Nearly every item exceeds the budget of a step, so its tower runs in parts while other requests decode."""
    whole, advance, pieces = Config.engine, EncoderCache.advance, Counter[bool]()

    def counted(cache: EncoderCache, plan: StepPlan) -> bool:
        ran = advance(cache, plan)
        pieces[ran] += 1
        return ran

    monkeypatch.setattr(Config, "engine", lambda config: replace(whole(config), encoder_budget=24))
    monkeypatch.setattr(EncoderCache, "advance", counted)
    with inside("--model", str(tiny.checkpoint("omni")), *SMALL, *CACHE) as server:
        await check_leavers(server, known, folder, [600])
    assert pieces[True] > 100
