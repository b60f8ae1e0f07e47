"""Processor cache and decode budget: bounded in bytes, fair, with exact counts when waiting requests leave."""

from __future__ import annotations

import asyncio
import random

import numpy as np

from mm.budget import Budget
from mm.cache import ProcessorCache
from mm.item import Part, Processed


def item(size: int) -> Processed:
    return Processed("image", (Part("image", b"", 1, {"pixel_values": np.zeros(size, np.uint8)}),))


def test_the_oldest_unused_entry_leaves_first() -> None:
    cache = ProcessorCache(3 * 2048)
    for name in (b"a", b"b", b"c"):
        cache.put((b"", name), item(1024))
    assert cache.get((b"", b"a")) is not None
    cache.put((b"", b"d"), item(1024))
    assert cache.get((b"", b"b")) is None
    assert {key[1] for key in ((b"", b"a"), (b"", b"c"), (b"", b"d")) if cache.get(key)} == {b"a", b"c", b"d"}
    assert (cache.queries, cache.hits) == (5, 4)


def test_bytes_are_counted_over_random_moves() -> None:
    rng = random.Random(0)
    cache = ProcessorCache(50_000)
    for _ in range(3000):
        key = (b"", bytes([rng.randrange(60)]))
        if rng.random() < 0.6:
            cache.put(key, item(rng.randrange(20_000)))
        else:
            cache.get(key)
        assert cache.used == sum(entry.nbytes + 1024 for entry in cache._entries.values()) <= cache.capacity
    cache.clear()
    assert cache.used == len(cache) == 0


def test_an_item_larger_than_the_cache_is_not_cached() -> None:
    cache = ProcessorCache(10_000)
    cache.put((b"", b"a"), item(100))
    cache.put((b"", b"b"), item(20_000))
    assert cache.get((b"", b"a")) is not None
    assert cache.get((b"", b"b")) is None
    off = ProcessorCache(0)
    off.put((b"", b"a"), item(1))
    assert len(off) == 0


def test_names_stay_within_their_scope_and_die_with_the_entry() -> None:
    cache = ProcessorCache(4096)
    cache.put((b"s", b"a"), item(2000))
    cache.name(b"cat", (b"s", b"a"))
    assert cache.named(b"s", b"cat") is not None
    assert cache.named(b"t", b"cat") is None
    cache.put((b"s", b"b"), item(2000))
    assert cache.named(b"s", b"cat") is None


async def test_budget_serves_in_order_and_never_passes_its_total() -> None:
    budget = Budget(100)
    order: list[int] = []

    async def user(number: int, size: int) -> None:
        await budget.reserve(size)
        order.append(number)
        assert budget.used <= 100
        await asyncio.sleep(0)
        budget.release(size)

    await asyncio.gather(*(user(number, size) for number, size in enumerate((60, 60, 10, 100, 1))))
    assert order == [0, 1, 2, 3, 4]
    assert budget.used == 0


async def test_budget_survives_waiters_that_leave() -> None:
    rng = random.Random(3)
    budget = Budget(50)

    async def user() -> None:
        size = rng.randint(1, 50)
        await budget.reserve(size)
        try:
            await asyncio.sleep(rng.random() * 0.002)
        finally:
            budget.release(size)

    tasks = [asyncio.create_task(user()) for _ in range(200)]
    for task in rng.sample(tasks, 80):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.used == 0
    assert not budget._waiting


async def test_a_leaving_waiter_lets_smaller_ones_pass() -> None:
    budget = Budget(10)
    await budget.reserve(5)
    large = asyncio.create_task(budget.reserve(10))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.reserve(5))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait_for(small, 60)
    assert budget.used == 10
