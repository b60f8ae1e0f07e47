"""Process: `python -m server`, from bind to exit status.

Owner: main thread, then loop. The socket is bound and answers 503 before anything is loaded. A signal ends the server;
a second one ends it at once.

    bind -- listen (503 starting) -- Lifespan.start -- ready -- SIGTERM -- Lifespan.drain -- close -- exit
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

import uvloop

from engine.base.errors import ConfigError
from engine.device.host_memory import memory_limit
from server.app import make_app
from server.flags.config import Config
from server.http.listen import BindError, Listener, address, bind, make_listener
from server.ops import logs
from server.ops.planted import faults_of
from server.start import signals
from server.start.budgets import fitted
from server.start.lifespan import JOIN_S, Lifespan
from server.state import AppState

log = logging.getLogger("omniloop")

EXIT_DEAD = 70
EXIT_STUCK = 3
SWITCH_INTERVAL_S = 0.0005


def serve(config: Config) -> int:
    """Run until a signal, and return the exit status of the process."""
    begun = time.perf_counter()
    logs.configure(config.server)
    try:
        listener = bind(config)
        state = AppState(fitted(config, memory_limit()))
        state.startup["bind"] = time.perf_counter() - begun
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(Process(state, listener).run())
    except (BindError, ConfigError, OSError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
    if status == EXIT_DEAD:
        leave(status)
    return status


def leave(status: int) -> NoReturn:
    """Exit at once. An ordinary exit may fail: freeing memory of a lost device can end in a library's abort(), with
    another status, and Python would wait for threads that import, download or load, which do not stop. The next start
    resumes a download."""
    logging.shutdown()
    os._exit(status)


class Process:
    """One server process from bind to exit. Owner: loop."""

    def __init__(self, state: AppState, socket: socket.socket) -> None:
        self.state = state
        self.socket = socket
        self.where, state.port = address(state.config, socket)
        self.lifespan = Lifespan(state)
        self.listener: Listener
        self.reloading: asyncio.Task[None] | None = None  # the task that reads the key file

    async def run(self) -> int:
        """Serve until a signal, and return the exit status."""
        loop, lifespan = asyncio.get_running_loop(), self.lifespan
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lifespan.stop)
        loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
        for _ in range(signals.taken()):
            lifespan.stop()
        self.listener = make_listener(self.state.config, make_app(self.state))
        serving = loop.create_task(self.listener.serve([self.socket]))
        status = 0
        try:
            await self.start()
            await lifespan.stopping.wait()
            if self.state.phase == "dead":
                last_resort(self.state.config.health.engine_death_exit, EXIT_DEAD)
            await lifespan.drain()
        except ConfigError as error:
            print(f"omniloop: {error}", file=sys.stderr)
            status = 1
        finally:
            await self.close(serving)
        if self.state.phase == "dead" or lifespan.exhausted:
            status = EXIT_DEAD
        if lifespan.cut_short:
            leave(status)
        return status

    async def start(self) -> None:
        """Load everything, then print where the server listens."""
        config = self.state.config
        if not self.state.keys and not config.is_loopback:
            log.warning(
                "the server listens on %s without an API key, and every client that reaches it may use "
                "it; set --api-key, or --host 127.0.0.1",
                config.server.host,
            )
        await self.lifespan.start()
        if self.state.phase == "ready":
            if recommends_isolation(self.state):
                log.warning(
                    "media are decoded in this process; strangers' media are better decoded in processes of their own: "
                    "--media-isolation all"
                )
            own_interpreter()
            logs.say(f"Listening on {self.where}")

    async def close(self, serving: asyncio.Task[None]) -> None:
        """Close the sockets, then everything behind them, each with a timeout."""
        last_resort(3 * JOIN_S)
        self.listener.stop_now()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, JOIN_S)
        tasks = self.listener.server_state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=2)
        await self.lifespan.close()
        if self.reloading is not None:
            self.reloading.cancel()
        if self.state.config.server.uds:
            with contextlib.suppress(OSError):
                os.unlink(self.state.config.server.uds)

    def on_hangup(self) -> None:
        """Read the key file again, in a thread, since a disk may be slow."""
        self.reloading = asyncio.get_running_loop().create_task(reread_keys(self.state, self.reloading))


async def reread_keys(state: AppState, before: asyncio.Task[None] | None = None) -> None:
    """Read the key file after the reading `before` ends, so that the latest one counts; a bad file changes nothing."""

    def read() -> None:
        if (faults := faults_of(state)) is not None:
            faults.at("disk")
        state.keys.reload()

    if before is not None:
        await asyncio.wait({before})
    try:
        await asyncio.to_thread(read)
    except (ConfigError, OSError) as error:
        log.error("the keys stay as they were: %s", error)


def recommends_isolation(state: AppState) -> bool:
    """Whether anyone can send media that are decoded in this process, although a helper process could decode them."""
    config = state.config
    open_to_all = state.media is not None and not config.is_loopback and not config.server.uds
    return open_to_all and config.media.media_isolation != "all" and sys.platform.startswith("linux")


def own_interpreter() -> None:
    """Settings for the whole interpreter, for a process that only serves and has loaded everything."""
    freeze_heap()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def freeze_heap() -> None:
    """Exclude everything loaded so far from garbage collection, and collect rarely.

    Ended requests leave no garbage (tests/end_to_end/test_no_garbage.py), so a collection finds almost nothing. A
    collection visits the objects made since the last one that are still alive: 2,000 objects take a quarter of a
    millisecond. The older objects, all those held by open requests, are visited a hundred times less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 100, 100)


def last_resort(seconds: float, status: int = EXIT_STUCK) -> None:
    """End the process if our code or a library's thread prevents it from ending."""

    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
