"""Home: the adapters of a server by name, and those of them that host memory holds.

Owner: loop; `load` runs in the pool. In: names and Sources. Out: an Adapter for a request, which holds it until the
request ends, so that an unload or a reload never changes a running answer. The adapter that was used least recently
leaves the memory first; its name stays, and its files are read again when a request names it.

    name -> in memory?  yes: the adapter    no: one load, however many requests wait -> the adapter, or the error

A load checks the names and sizes of the files before an adapter leaves the memory for it: a wrong name, or an adapter
that does not fit, costs no other adapter its room.
"""

from __future__ import annotations

import asyncio
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.base.errors import AdapterBusyError, AdapterError
from engine.lora.source import Source

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter

NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
DOTS = {"", ".", ".."}  # components that would give one folder any number of names
ROOM_S = 30.0  # seconds that a load waits until the adapters in memory are fewer
MISSING_S = 5.0  # seconds for which a name that the folder lacks is not looked for again
MISSING = 1024  # such names
LOADS = 2  # loads at one time


@dataclass(slots=True, eq=False)
class Named:
    """An adapter that the server knows."""

    name: str
    source: Source
    adapter: Adapter | None = None  # None: not in memory
    created: int = field(default_factory=lambda: int(time.time()))


class Home:
    """Names, and the adapters in host memory."""

    def __init__(
        self,
        load: Callable[[Source, str], Adapter],
        check: Callable[[Source, str], object],
        pool: Executor,
        capacity: int,
        folder: str = "",
    ) -> None:
        """`load` reads an adapter, and `check` its names and sizes, in `pool`; `capacity`: adapters in memory;
        `folder`: where unknown names are looked for, "": nowhere."""
        self._load, self._check, self._pool, self._folder = load, check, pool, folder
        self.capacity = capacity
        # Fetches an adapter that a client named, in `pool`; None: the name is of another form. Without it: none is.
        self.fetched: Callable[[str], Source | None] | None = None
        self._named: OrderedDict[str, Named] = OrderedDict()  # least recently used first
        self._alive: weakref.WeakSet[Adapter] = weakref.WeakSet()  # in memory, also for requests that run
        self._busy: dict[str, asyncio.Task[Adapter]] = {}  # loads by name
        self._turn = asyncio.Semaphore(LOADS)
        self._freed = asyncio.Event()  # set when an adapter left the memory
        self._missing: OrderedDict[str, tuple[float, AdapterError]] = OrderedDict()
        self.failures = 0  # loads that failed

    @property
    def names(self) -> list[Named]:
        """All adapters, sorted by name."""
        return sorted(self._named.values(), key=lambda each: each.name)

    @property
    def num_loading(self) -> int:
        """Loads that have not ended."""
        return len(self._busy)

    def get(self, name: str) -> Named | None:
        """A known adapter."""
        return self._named.get(name)

    async def use(self, name: str) -> Adapter | None:
        """The adapter of a name, loaded if it is not in memory; None: there is none. Raises AdapterError."""
        named, busy = self._named.get(name), self._busy.get(name)
        if named is not None and named.adapter is not None:
            self._named.move_to_end(name)
            return named.adapter
        if busy is not None:
            return await asyncio.shield(busy)
        if named is not None:
            return await self._begun(name, self._read(named, named))
        if not self._folder or NAME.fullmatch(name) is None or DOTS.intersection(name.split("/")):
            return None
        return await self._sought(name)

    async def add(self, name: str, source: Source, replace: bool = False) -> Adapter:
        """Loads an adapter. Raises AdapterError, after which nothing has changed; `replace`: the name may be known."""
        if NAME.fullmatch(name) is None:
            raise AdapterError("a name has 1 to 128 characters of A-Z, a-z, 0-9 and ._/-")
        if name in self._busy:
            raise AdapterError(f"an adapter named {name} is being loaded; wait for its end")
        if name in self._named and not replace:
            raise AdapterError(f"an adapter named {name} is loaded already; send load_inplace, or unload it first")
        return await self._begun(name, self._read(Named(name, source), self._named.get(name)))

    def remove(self, name: str) -> bool:
        """Forgets a name; False: it is not known. Requests that run hold their adapter until they end."""
        return self._named.pop(name, None) is not None

    async def _begun(self, name: str, work: Coroutine[None, None, Adapter]) -> Adapter:
        """Runs a load that goes on if its caller leaves."""
        task = self._busy[name] = asyncio.ensure_future(work)
        task.add_done_callback(lambda ended: self._ended(name, ended))
        return await asyncio.shield(task)

    def _ended(self, name: str, task: asyncio.Task[Adapter]) -> None:
        del self._busy[name]
        if not task.cancelled() and task.exception() is not None:
            self.failures += 1

    async def _sought(self, name: str) -> Adapter | None:
        """The adapter of a name in the folder; a name that was not found is remembered for a while."""
        missing = self._missing.get(name)
        if missing is not None and time.monotonic() - missing[0] < MISSING_S:
            if missing[1].missing:
                return None
            raise missing[1]
        try:
            return await self._begun(name, self._read(Named(name, Source(name, self._folder, name)), None))
        except AdapterError as error:
            self._missing[name] = time.monotonic(), error
            while len(self._missing) > MISSING:
                self._missing.popitem(last=False)
            if error.missing:
                return None
            raise

    async def _read(self, named: Named, known: Named | None) -> Adapter:
        """Reads an adapter, and makes its name known; `known`: what the name meant when the load began."""
        loop = asyncio.get_running_loop()
        if named is not known:
            await loop.run_in_executor(self._pool, self._check, named.source, named.name)
        async with self._turn:
            await self._make_room(known)
            loaded: list[Adapter] = []
            await loop.run_in_executor(self._pool, self._load_into, loaded, named)
        adapter = loaded.pop()
        self._alive.add(adapter)
        weakref.finalize(adapter, self._wake, loop).atexit = False
        if self._named.get(named.name) is not known:
            raise AdapterError(f"{named.name} was unloaded while it was loaded")
        named.adapter = adapter
        self._named[named.name] = named
        self._named.move_to_end(named.name)
        self._missing.pop(named.name, None)
        return adapter

    def _load_into(self, loaded: list[Adapter], named: Named) -> None:
        """Appends the adapter. It is no result, because the pool's thread may hold the result of its last call."""
        loaded.append(self._load(named.source, named.name))

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """An adapter left the memory; on the thread that held it last."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._freed.set)

    async def _make_room(self, replaced: Named | None) -> None:
        """Waits until there is room for one more adapter. An adapter that is replaced stays until its successor is
        complete."""
        deadline = time.monotonic() + ROOM_S
        room = self.capacity - 1 + (replaced is not None and replaced.adapter is not None)
        while len(self._alive) > room:
            self._freed.clear()
            oldest = next((each for each in self._named.values() if each.adapter and each is not replaced), None)
            if oldest is not None:
                oldest.adapter = None
                continue
            try:
                await asyncio.wait_for(self._freed.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise AdapterBusyError(
                    f"host memory holds {self.capacity} adapters, and requests use them all (--max-cpu-loras); try "
                    "again later"
                ) from None
