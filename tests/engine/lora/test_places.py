"""Places: which adapter gets a place, who waits, and what a failed fill leaves behind."""

import asyncio
import hashlib
import random
import threading
import time
from dataclasses import replace

import pytest

from engine import FinishReason
from engine.base.config import LoraConfig
from engine.lora.adapter import Adapter
from engine.lora.device import Rooms, groups
from engine.lora.places import PATIENCE, RETRY, Places
from engine.run import start
from engine.step.parts.adapters import Adapters
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, answer_deltas, quiet, running, text_request
from tests.lora_kit import adapted, drawn

QWEN3 = tiny.checkpoint("qwen3")


def adapter(name: str) -> Adapter:
    return Adapter(name, hashlib.sha256(name.encode()).digest(), 8, {}, 0)


A, B, C = (adapter(name) for name in "abc")


class Memory:
    """Places in a list; a fill waits until the test lets it end."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def fill(self, number: int, adapter: Adapter) -> None:
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error
        self.held[number] = adapter.name


class Desk:
    """Places with a clock that the test sets."""

    def __init__(self, count: int = 2) -> None:
        self.memory, self.now, self.woken = Memory(), 0.0, threading.Semaphore(0)
        self.places = Places(count, self.memory, self.woken.release, lambda: self.now)

    def enters(self, adapter: Adapter) -> int:
        """The place of a row that enters, after a fill unless its adapter is resident."""
        if not self.places.opens(adapter, 0.0):
            assert self.woken.acquire(timeout=10)
            assert self.places.opens(adapter, 0.0)
        number = self.places.number(adapter)
        self.places.hold(number)
        return number


def test_the_least_recently_used_free_place_is_filled():
    desk = Desk()
    first, second = desk.enters(A), desk.enters(B)
    assert {first, second} == {1, 2}
    desk.places.release(first)
    desk.places.release(second)
    assert desk.enters(C) == first
    assert desk.memory.held == {first: "c", second: "b"}
    assert desk.enters(B) == second
    assert desk.places.swaps == 3


def test_a_place_with_rows_is_not_filled():
    desk = Desk()
    desk.enters(A)
    number = desk.enters(B)
    assert not desk.places.opens(C, 0.0)
    assert desk.enters(A) == 3 - number, "rows of resident adapters do not wait"
    desk.places.release(number)
    assert desk.enters(C) == number


def test_rows_wait_until_their_place_is_filled():
    desk = Desk()
    desk.memory.may_end.clear()
    assert not desk.places.opens(A, 0.0)
    assert not desk.places.opens(A, 0.0)
    desk.memory.may_end.set()
    assert desk.woken.acquire(timeout=10)
    assert desk.places.opens(A, 0.0)
    assert desk.places.swaps == 1


def test_after_two_seconds_the_adapter_with_the_fewest_rows_takes_no_more():
    desk = Desk()
    many, few = desk.enters(A), desk.enters(B)
    desk.enters(A)
    desk.now = PATIENCE - 0.1
    assert not desk.places.opens(C, 0.0)
    assert desk.places.opens(B, 0.0)
    desk.now = PATIENCE + 0.1
    assert not desk.places.opens(C, 0.0)
    assert not desk.places.opens(B, 0.0), "the place is closed"
    assert desk.places.opens(A, 0.0), "one place for each adapter that waits"
    assert not desk.places.opens(C, 0.0)
    desk.places.release(few)
    assert desk.enters(C) == few
    assert many != few


def test_a_closed_place_opens_again_if_no_adapter_takes_it():
    desk = Desk(1)
    number = desk.enters(A)
    desk.now = PATIENCE + 0.1
    assert not desk.places.opens(C, 0.0)
    assert not desk.places.opens(A, 0.0)
    desk.places.release(number)
    assert desk.places.opens(A, 0.0)


def test_a_failed_fill_refuses_its_rows_and_is_tried_again_later(caplog):
    desk = Desk(1)
    desk.memory.error = MemoryError("no room")
    assert not desk.places.opens(A, 0.0)
    assert desk.woken.acquire(timeout=10)
    assert desk.places.opens(A, 0.0)
    with pytest.raises(MemoryError):
        desk.places.number(A)
    desk.memory.error, desk.now = None, RETRY + 1
    assert not desk.places.opens(A, 0.0)
    assert desk.woken.acquire(timeout=10)
    assert desk.places.opens(A, 0.0)
    assert desk.places.number(A) == 1
    assert "could not be moved" in caplog.text


@pytest.fixture(params=["host", "device"])
def backend(request, monkeypatch) -> str:
    """Both backends; the device has graphs that are plain calls."""
    if request.param == "device":
        monkeypatch.setattr(start, "open_accelerator", lambda _device: HostAccelerator())
    return request.param


async def test_many_adapters_go_through_few_places_with_aborts(backend):
    """Forty adapters, three places, every fifth request aborted: answers do not depend on the order of fills."""
    count = 120 if backend == "host" else 30
    made = [drawn(QWEN3, 2 + seed % 3, seed, scale=0.2) for seed in range(8)]
    copies = [replace(made[k % 8].adapter, sha256=hashlib.sha256(bytes([k])).digest()) for k in range(40)]
    requests = [replace(text_request([5, 6, 7 + k % 3], 4), lora=copies[k % 40]) for k in range(count)]
    async with running(QWEN3, lora=LoraConfig(max_loras=3)) as engine:
        alone = [await answer(engine, each) for each in requests[:24]]

        async def asked(k: int) -> None:
            if k % 5 == 4:
                stream = engine.submit(requests[k])
                await asyncio.sleep(0)
                stream.abort()
                return
            assert await answer(engine, requests[k]) == alone[k % 24]

        await asyncio.gather(*(asked(k) for k in range(count)))
        ledger = await quiet(engine)
        assert ledger["adapter_rows"] == 0
        part = await engine.on_device(lambda runtime: runtime.executor.part(Adapters))
        assert part.counts.used == 3
        assert part.counts.swaps > count // 3


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_thousand_adapters_share_eight_places():
    """10,000 requests, 200 at a time, every ninth aborted: answers are right and no request waits for 30 seconds."""
    made = [drawn(QWEN3, 4, seed, ("q_proj", "down_proj"), 0.2).adapter for seed in range(4)]
    adapters = [replace(made[k % 4], sha256=hashlib.sha256(k.to_bytes(2)).digest()) for k in range(1000)]
    order, open_requests, waits = random.Random(3), asyncio.Semaphore(200), []
    async with running(QWEN3, lora=LoraConfig(max_loras=8)) as engine:
        want = [await answer(engine, replace(text_request([5, 6, 7], 3), lora=each)) for each in made]

        async def asked(k: int, number: int) -> None:
            async with open_requests:
                arrival = time.monotonic()
                stream = engine.submit(replace(text_request([5, 6, 7], 3), lora=adapters[number], arrival=arrival))
                if k % 9 == 0:
                    await asyncio.sleep(0)
                    stream.abort()
                    return
                tokens = []
                async with stream:
                    async for delta in stream:
                        waits.append(0.0 if tokens else time.monotonic() - arrival)
                        tokens += delta.token_ids
                assert [tokens] == want[number % 4]

        await asyncio.gather(*(asked(k, order.randrange(1000)) for k in range(10_000)))
        assert (await quiet(engine))["adapter_rows"] == 0
    assert max(waits) < 30


async def test_an_adapter_that_does_not_fit_fails_alone(backend, caplog):
    good = drawn(QWEN3, 4, 1)
    site = next(iter(good.adapter.sites.values()))
    bad = replace(good.adapter, sha256=bytes(32), sites={"layers.9.nothing": site})
    async with running(QWEN3, lora=LoraConfig(max_loras=2)) as engine:
        async with engine.submit(replace(text_request([5, 6, 7], 4), lora=bad)) as stream:
            deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert len((await answer(engine, adapted(text_request([5, 6, 7], 4), good)))[0]) == 4
    assert "no place for layers.9.nothing" in caplog.text


async def test_choices_of_a_request_that_wait_for_its_prompt_keep_their_adapter(backend):
    """The first choice ends with its first token; the place may be filled with another adapter before others join."""
    one, two = drawn(QWEN3, 4, 1), drawn(QWEN3, 4, 2)
    prompt = list(range(3, 43))
    async with running(QWEN3, lora=LoraConfig(max_loras=1)) as engine:
        want = await answer(engine, adapted(text_request(prompt, 1), one))
        asked = adapted(text_request(prompt, 1, n=4), one), adapted(text_request(prompt, 3), two)
        several, _ = await asyncio.gather(*(answer(engine, each) for each in asked))
        assert several == want * 4
        assert (await answer_deltas(engine, asked[0]))[3][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("count", "size"), [(1, 90), (16, 88), (3, 1 << 20), (7, 100), (40, 3)])
def test_rooms_of_packed_adapters_waste_little_pinned_memory(count, size):
    sets = list(groups(count, size))
    assert sum(sets) == count
    assert sum(1 << (rooms * size - 1).bit_length() for rooms in sets) <= max(1.34 * count * size, 2 * size)
    rooms = Rooms(HostAccelerator(), count, size).all()
    assert [len(room) for room in rooms] == [size] * count
    assert len({room.data_ptr() for room in rooms}) == count
