"""Home: names, single loads, the memory's limit, and loads that fail."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.base.errors import AdapterBusyError, AdapterError
from engine.lora import home as module
from engine.lora.adapter import Adapter
from engine.lora.home import Home
from engine.lora.source import Source


class Files:
    """Stands for the loader: a source's folder is the adapter's content; a load may wait for `gate`."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def check(self, source: Source, name: str) -> None:
        """Finds what the names and sizes show."""
        if "none" in source.folder:
            self.loads.append(source.folder)
            raise AdapterError("there is no such folder", missing=True)

    def load(self, source: Source, name: str) -> Adapter:
        self.loads.append(source.folder)
        assert self.gate.wait(30)
        if "bad" in source.folder:
            raise AdapterError("adapter_config.json: r=0")
        return Adapter(name, source.folder.encode(), 4, {}, 0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def files() -> Files:
    return Files()


async def test_a_name_is_known_after_its_load(files, pool):
    home = Home(files.load, files.check, pool, 2)
    assert await home.use("x") is None
    added = await home.add("x", Source("a"))
    assert await home.use("x") is added
    assert [each.name for each in home.names] == ["x"]
    assert home.remove("x") and not home.remove("x")  # noqa: PT018
    assert await home.use("x") is None


async def test_a_name_is_loaded_once_and_replaced_only_on_request(files, pool):
    home = Home(files.load, files.check, pool, 2)
    first = await home.add("x", Source("a"))
    with pytest.raises(AdapterError, match="load_inplace"):
        await home.add("x", Source("b"))
    assert await home.use("x") is first
    second = await home.add("x", Source("b"), replace=True)
    assert second.sha256 == b"b"
    assert await home.use("x") is second


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ä", "a\n", "a:b"])
async def test_odd_names_are_refused(files, pool, name):
    home = Home(files.load, files.check, pool, 2, "folder")
    with pytest.raises(AdapterError, match="characters"):
        await home.add(name, Source("a"))
    assert await home.use(name) is None
    assert not files.loads


async def test_two_loads_of_one_name_and_requests_during_a_load(files, pool):
    home = Home(files.load, files.check, pool, 2)
    files.gate.clear()
    first = asyncio.ensure_future(home.add("x", Source("a")))
    await asyncio.sleep(0)
    with pytest.raises(AdapterError, match="being loaded"):
        await home.add("x", Source("b"))
    waiting = asyncio.ensure_future(home.use("x"))
    await asyncio.sleep(0)
    assert home.num_loading == 1
    files.gate.set()
    assert await waiting is await first
    assert files.loads == ["a"]
    assert home.num_loading == 0


async def test_a_failed_load_changes_nothing(files, pool):
    home = Home(files.load, files.check, pool, 2)
    kept = await home.add("x", Source("a"))
    for folder in ("bad", "none"):
        with pytest.raises(AdapterError):
            await home.add("x", Source(folder), replace=True)
        with pytest.raises(AdapterError):
            await home.add("y", Source(folder))
    assert await home.use("x") is kept
    assert [each.name for each in home.names] == ["x"]
    assert (home.failures, home.num_loading) == (4, 0)


async def test_a_client_that_leaves_does_not_end_a_load(files, pool):
    home = Home(files.load, files.check, pool, 1)
    files.gate.clear()
    first = asyncio.ensure_future(home.add("x", Source("a")))
    await asyncio.sleep(0)
    first.cancel()
    files.gate.set()
    found = await home.use("x")
    assert found is not None
    assert found.sha256 == b"a"


async def test_an_unload_during_a_reload_wins(files, pool):
    home = Home(files.load, files.check, pool, 2)
    await home.add("x", Source("a"))
    files.gate.clear()
    reload = asyncio.ensure_future(home.add("x", Source("b"), replace=True))
    await asyncio.sleep(0)
    assert home.remove("x")
    files.gate.set()
    with pytest.raises(AdapterError, match="unloaded"):
        await reload
    assert not home.names


class Slow(ThreadPoolExecutor):
    """A pool whose threads hold the results of their calls, as a thread does until it runs again."""

    def __init__(self, count):
        super().__init__(count)
        self.results = []

    def submit(self, fn, /, *args, **kwargs):
        def call():
            self.results.append(fn(*args, **kwargs))
            return self.results[-1]

        return super().submit(call)


async def test_the_least_recently_used_leaves_the_memory_and_comes_back(files):
    with Slow(1) as pool:
        home = Home(files.load, files.check, pool, 2)
        for name in ("x", "y"):
            await home.add(name, Source(name))
        await home.use("x")
        await home.add("z", Source("z"))
        assert {each.name for each in home.names if each.adapter is None} == {"y"}
        found = await home.use("y")
        assert found is not None
        assert found.sha256 == b"y"
        assert files.loads == ["x", "y", "z", "y"]
        assert {each.name for each in home.names if each.adapter is None} == {"x"}


async def test_adapters_of_running_requests_count_and_a_load_waits_for_them(files, pool):
    home = Home(files.load, files.check, pool, 2)
    running = [await home.add(name, Source(name)) for name in ("x", "y")]
    waiting = asyncio.ensure_future(home.add("z", Source("z")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert files.loads == ["x", "y"]
    running.pop()
    gc.collect()
    assert (await waiting).name == "z"


async def test_a_load_without_room_is_refused_after_a_while(files, pool, monkeypatch):
    monkeypatch.setattr(module, "ROOM_S", 0.01)
    home = Home(files.load, files.check, pool, 1)
    running = await home.add("x", Source("x"))
    with pytest.raises(AdapterBusyError, match="max-cpu-loras"):
        await home.add("y", Source("y"))
    assert running.name == "x"


async def test_unknown_names_are_sought_in_the_folder_once(files, pool, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    home = Home(files.load, files.check, pool, 2, "folder")
    found = await asyncio.gather(*(home.use("tone") for _ in range(5)))
    assert len({id(each) for each in found}) == 1
    assert files.loads == ["tone"]
    for _ in range(3):
        assert await home.use("none") is None
        with pytest.raises(AdapterError, match="r=0"):
            await home.use("bad")
    assert files.loads == ["tone", "none", "bad"]
    now[0] += 6
    assert await home.use("none") is None
    assert files.loads == ["tone", "none", "bad", "none"]


async def test_a_thousand_loads_leave_nothing_behind(files, pool, tmp_path: Path):
    home = Home(files.load, files.check, pool, 3)
    for number in range(1000):
        await home.add("x" if number % 2 else f"n{number % 7}", Source(str(number)), replace=True)
    assert len([each for each in home.names if each.adapter is not None]) <= 3
    assert home.num_loading == 0


async def test_a_wrong_name_takes_no_adapters_room_and_waits_for_none(files, pool):
    home = Home(files.load, files.check, pool, 2, "folder")
    running = [await home.add(name, Source(name)) for name in ("x", "y")]  # requests hold both
    assert await home.use("none") is None
    with pytest.raises(AdapterError, match="no such folder"):
        await home.add("z", Source("none"))
    assert [each.adapter for each in home.names] == running


@pytest.mark.parametrize("name", ["./tone", "tone/", "tone/.", "a//tone", "a/../tone", "/tone"])
async def test_a_folder_has_one_name(files, pool, name):
    """Else a client could add names without end."""
    home = Home(files.load, files.check, pool, 2, "folder")
    assert await home.use(name) is None
    assert not files.loads
