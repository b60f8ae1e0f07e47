"""The whole server inside the test process, on its own loop and thread, so that a test can read the server's state.

App, sockets and engine are those of `python -m server`; only signals and the command line are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import uvloop

from engine.engine import Engine
from server.app import make_app
from server.cli import parse
from server.http.listen import Listener, address, bind, make_listener
from server.start import load
from server.start.process import SWITCH_INTERVAL_S, freeze_heap
from server.state import AppState

T = TypeVar("T")
HELD = (
    "used", "slots", "streams", "routes", "live_rows", "siblings", "waiting", "inbox", "encoder_in_use",
)  # fmt: skip


class InsideServer:
    """Owner: the server's own thread; `call` runs a coroutine function in that thread."""

    def __init__(self, *flags: str) -> None:
        self.config = parse([*flags, "--host", "127.0.0.1", "--port", "0"])[1]
        self.state = AppState(self.config)
        self.socket = bind(self.config)
        self.port = address(self.config, self.socket)[1]
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self.thread = threading.Thread(target=self._main, name="inside-server")
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self.listener: Listener

    def start(self) -> None:
        self.thread.start()
        self._ready.wait(60)
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server's thread did not end"
        if self._failed is not None:
            raise self._failed

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work()` on the server's loop."""

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def ledger(self) -> dict[str, int]:
        async def read() -> dict[str, int]:
            return self.state.ledger()

        return self.call(read)

    def tasks(self) -> int:
        """Number of tasks on the server's loop, without the counting task."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.call(count)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as error:
            self._failed = error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        state = self.state
        self.listener = listener = make_listener(self.config, make_app(state))
        serving = asyncio.ensure_future(listener.serve([self.socket]))
        state.engine = Engine(self.config.engine())
        await load.load(state)
        freeze_heap()
        state.phase = "ready"
        self._ready.set()
        await self._stop.wait()
        listener.stop_now()
        await serving
        if state.media is not None:
            await state.media.close()
        await state.engine.stop(0.0)
        state.pool.shutdown(wait=True)


@contextlib.contextmanager
def inside(*flags: str) -> Iterator[InsideServer]:
    """A ready server in this process; at the end of the block it must hold no resource."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = InsideServer(*flags)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.unfreeze()


def held(ledger: dict[str, int]) -> dict[str, int]:
    """Entries of the ledger that are not zero, among those that must be zero once no request is open."""
    return {
        name: count
        for name, count in ledger.items()
        if count and (name.removeprefix("engine_") in HELD or name in ("exchanges", "places", "body_bytes"))
    }


def flags_of(**settings: Any) -> list[str]:
    """Flags from keywords: max_n=2 becomes --max-n 2."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
