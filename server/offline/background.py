"""Background: the app's lifespan on a thread with a loop of its own.

Owner: the thread that makes it; `run` and `close` may be called by any thread. In: a Hosted app. Out: results of
coroutines that run on that loop. The app starts and ends by the lifespan's messages, as in any server that hosts it.

    caller    Background() ......... ready     run(coroutine) ... result     close()
    thread    lifespan.startup ----- complete  |                             lifespan.shutdown: drain, engine stops
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop
from starlette.types import Message

from engine.base.errors import ConfigError
from server.hosted import Hosted

T = TypeVar("T")
NAME = "omniloop-offline"


class Background:
    """Runs an app until `close`, or until the process ends. Raises ConfigError if the app cannot start."""

    def __init__(self, app: Hosted) -> None:
        self._ready: Future[None] = Future()
        self._loop = uvloop.new_event_loop()
        self._leave = asyncio.Event()
        thread = threading.Thread(
            target=_live, args=(app, self._loop, self._leave, self._ready), name=NAME, daemon=True
        )
        self._end = weakref.finalize(self, _end, self._loop, self._leave, thread)
        self._end.atexit = False
        _before_exit(self._end)
        thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. If the caller is interrupted, it is cancelled."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """End the app and the thread; later calls do nothing."""
        self._end()


def _live(app: Hosted, loop: asyncio.AbstractEventLoop, leave: asyncio.Event, ready: Future[None]) -> None:
    """The thread: one lifespan of the app."""

    async def receive() -> Message:
        if not ready.done():
            return {"type": "lifespan.startup"}
        await leave.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            ready.set_result(None)
        elif message["type"] == "lifespan.startup.failed":
            ready.set_exception(ConfigError(message["message"]))

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            runner.run(app({"type": "lifespan"}, receive, send))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)


def _before_exit(call: Callable[[], object]) -> None:
    """Call it when the process ends, while executors still take work: `atexit` would come too late to stop the engine.

    concurrent.futures uses the same hook, which has no public name; later calls of it run first.
    """
    threading._register_atexit(call)  # type: ignore[attr-defined]


def _end(loop: asyncio.AbstractEventLoop, leave: asyncio.Event, thread: threading.Thread) -> None:
    if thread.is_alive():
        loop.call_soon_threadsafe(leave.set)
        if threading.current_thread() is not thread:  # the garbage collector may run on it
            thread.join()
