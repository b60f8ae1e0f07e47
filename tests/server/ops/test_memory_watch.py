"""Short of memory: first no media and no large bodies, then a drain; budgets follow the limit (SECURITY S44)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from mm.heap import trim_heap
from server.flags.config import Config
from server.ops.memory_watch import MemoryWatch
from server.ops.trimming import IDLE, MUCH, Trimming
from server.start.budgets import SHARES, fitted
from tests.server.live import picture

GIB = 1 << 30
PICTURE = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}]
SEES = {"messages": [{"role": "user", "content": PICTURE}], "max_tokens": 1}
LARGE = {"prompt": "a" * 100_000, "max_tokens": 1}
SMALL = {"prompt": "hi", "max_tokens": 1}


@pytest.fixture
def watched(serve):
    """(client, its watch, the used bytes that the watch reads, a list with an entry for each exhaustion)."""
    client = serve()
    held, ends = [GIB], []
    watch = MemoryWatch(client.state, lambda: ends.append(1), lambda: held[0], 10 * GIB)
    yield client, watch, held, ends
    watch.close()
    client.state.media.shedding = False  # the session's servers share this loader


@pytest.mark.asyncio(loop_scope="session")
async def test_s44_above_the_soft_limit_no_media_and_no_large_bodies_are_taken(watched):
    client, watch, held, ends = watched
    watch.start()
    assert (await client.post("/v1/chat/completions", SEES)).status == 200
    large = await client.post("/v1/completions", LARGE)
    assert large.error["reason"] == "context_length_exceeded"
    held[0] = int(8.6 * GIB)
    watch.look()
    assert watch.level == "soft"
    assert not client.state.media.cache.used
    seen = await client.post("/v1/chat/completions", SEES)
    assert (seen.status, seen.error["reason"]) == (429, "media_busy")
    assert int(seen.reply_headers["retry-after"]) >= 1
    large = await client.post("/v1/completions", LARGE)
    assert (large.status, large.error["reason"]) == (429, "queue_full")
    assert "short of memory" in large.error["message"]
    assert (await client.post("/v1/completions", SMALL)).status == 200
    held[0] = 8 * GIB  # still too close to the limit
    watch.look()
    assert watch.level == "soft"
    held[0] = 7 * GIB
    watch.look()
    assert (await client.post("/v1/chat/completions", SEES)).status == 200
    assert not ends


@pytest.mark.asyncio(loop_scope="session")
async def test_s44_above_the_hard_limit_the_server_ends_in_order_once(watched):
    client, watch, held, ends = watched
    watch.start()
    held[0] = int(9.6 * GIB)
    watch.look()
    assert ends == [1]
    assert (await client.post("/v1/chat/completions", SEES)).error["reason"] == "media_busy"


@pytest.mark.asyncio(loop_scope="session")
async def test_s44_a_model_that_takes_more_than_the_soft_limit_raises_the_limits_in_words(watched, caplog):
    _, watch, held, ends = watched
    held[0] = 9 * GIB
    watch.start()
    assert "after loading the server has 9.0 GiB, above --rss-soft-fraction" in caplog.text
    assert watch.level == "ok"
    held[0] = int(9.6 * GIB)
    watch.look()
    assert watch.level == "soft"
    assert not ends
    held[0] = int(9.8 * GIB)
    watch.look()
    assert ends == [1]


def test_s44_default_budgets_fit_into_the_memory_and_chosen_ones_stay():
    usual = Config()
    assert fitted(usual, 1 << 40) == usual
    small = fitted(usual, 2 * GIB)
    total = sum(getattr(getattr(small, group), name) * unit for group, name, unit, _ in SHARES)
    assert total < 1.4 * GIB
    assert small.limits.body_budget_bytes == 2 * GIB // 16
    chosen = dataclasses.replace(usual, limits=dataclasses.replace(usual.limits, body_budget_bytes=512 << 20))
    assert fitted(chosen, 2 * GIB).limits.body_budget_bytes == 512 << 20
    assert fitted(chosen, 2 * GIB).media == small.media


def test_s44_freed_memory_goes_back_once_it_is_much_or_nothing_runs():
    trims: list[Future[bool]] = []

    class Pool:
        def submit(self, work: Callable[[], bool], /) -> Future[bool]:
            assert work is trim_heap
            trims.append(Future())
            return trims[-1]

    trimming, held = Trimming(Pool()), 100 << 20
    trimming.look(held, idle=True)
    trimming.look(held + IDLE, idle=True)
    trimming.look(held + MUCH, idle=False)
    assert not trims, "not above either"
    trimming.look(held + IDLE + 1, idle=True)
    trimming.look(held + 2 * MUCH, idle=True)
    assert len(trims) == 1, "one at a time"
    trims[0].set_result(True)
    trimming.look(held + MUCH, idle=True)  # the bytes in use now are the new base
    trimming.look(held + MUCH + IDLE, idle=True)
    assert len(trims) == 1
    trimming.look(held, idle=False)
    trimming.look(held + MUCH + 1, idle=False)
    assert len(trims) == 2, "above the least that was held since"
