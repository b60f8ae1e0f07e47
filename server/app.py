"""The route table, and the order in which things start and stop.

Owner: main thread, then loop. Start: bind, answer 503, load text and engine side by side in threads, warm up, print one
line. Stop: probes say 503, then work is refused, what runs may finish, the rest is told, engine and sockets close.

    bind -- listen (503 starting) -- [engine: device thread | text, media: pool] -- ready -- SIGTERM -- drain -- exit
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
from collections.abc import Coroutine, Iterator
from concurrent.futures import wait
from typing import Any, NoReturn

import uvloop
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.engine import Engine
from engine.errors import ConfigError
from server import load, logs, signals
from server.config import Config
from server.errors import not_found
from server.http.edge import Edge, Gate
from server.http.exchange import Exchanges
from server.http.listen import BindError, Listener, address, bind, make_listener
from server.routes import (
    absent,
    admin,
    chat,
    completion,
    dev,
    docs,
    health,
    messages,
    models,
    render,
    responses,
    stored_responses,
    tokenize,
    tokens,
)
from server.state import AppState

log = logging.getLogger("omniloop")

FAMILIES = (
    chat, completion, messages, responses, stored_responses, models, health, tokenize, render, tokens, admin, absent
)  # fmt: skip
EXIT_DEAD = 70
EXIT_STUCK = 3
JOIN_S = 10.0  # for threads and sockets after the drain
FETCH_S = 2.0  # for a download to give up, which it does when bytes arrive
SWITCH_INTERVAL_S = 0.0005


def make_app(state: AppState) -> ASGIApp:
    """Exchanges -> Edge -> Gate -> Router."""
    routes = routes_of(state.config)
    router = Router(routes, redirect_slashes=False, default=unknown_path)
    plain = {(method, line.path): line.app for line in routes if "{" not in line.path for method in line.methods or ()}

    async def root(scope: Scope, receive: Receive, send: Send) -> None:
        app = plain.get((scope["method"], scope["path"]))
        if app is not None:  # no need to try one pattern after another
            await app(scope, receive, send)
            return
        scope["app"] = router  # makes starlette raise on a wrong method, instead of answering in its own words
        await router(scope, receive, send)

    return Exchanges(Edge(Gate(root, state), state), state)


def routes_of(config: Config) -> list[Route]:
    """Every line of the table that the flags leave on."""
    server = config.server
    switched = [*([] if server.disable_docs else [docs]), *([dev] if server.enable_dev_endpoints else [])]
    return [line for family in (*FAMILIES, *switched) for line in family.ROUTES]


async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise not_found("there is no such path")


def serve(config: Config) -> int:
    """Runs until a signal; the process's exit status."""
    begun = time.perf_counter()
    logs.configure(config.server)
    try:
        listener = bind(config)
        state = AppState(config)
        state.startup["bind"] = time.perf_counter() - begun
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(Process(state, listener).run())
    except (BindError, ConfigError, OSError) as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 1
    if status == EXIT_DEAD or state.is_fetching:
        leave(status)
    return status


def leave(status: int) -> NoReturn:
    """At once: freeing what lies on a lost device can end in its libraries' abort(), with another status; and Python
    would wait for the threads of a download, which goes on at the next start."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Process:
    """One server process from bind to exit. Owner: loop."""

    def __init__(self, state: AppState, socket: socket.socket) -> None:
        self.state = state
        self.socket = socket
        self.where, state.port = address(state.config, socket)
        self.listener: Listener
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()  # a second signal: do not wait
        self.exit_status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.on_hangup)
        for _ in range(signals.taken()):
            self.on_signal()
        self.listener = make_listener(self.state.config, make_app(self.state))
        serving = loop.create_task(self.listener.serve([self.socket]))
        try:
            await self.start()
            await self.stopping.wait()
            await self.drain()
        except ConfigError as error:
            print(f"omniloop: {error}", file=sys.stderr)
            self.exit_status = 1
        finally:
            await self.close(serving)
        return self.exit_status

    async def start(self) -> None:
        """Loads everything; a signal during that ends it."""
        state, config = self.state, self.state.config
        self.greet()
        if not await self.unless_stopped(load.fetch(state), None):
            return
        engine = state.engine = Engine(config.engine(state.folder))
        engine.on_death = self.on_death
        if not await self.unless_stopped(load.load(state), config.server.startup_timeout):
            return
        freeze_heap()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        state.phase = "ready"
        logs.log_startup({**state.startup, **state.engine.startup})
        print(f"Listening on {self.where}", flush=True)

    async def unless_stopped(self, work: Coroutine[Any, Any, None], timeout: float | None) -> bool:
        """Whether a part of the start has come to its end; False: a signal came first."""
        loading = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait({loading, stopped}, timeout=timeout, return_when="FIRST_COMPLETED")
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            if self.stopping.is_set():
                return False
            raise ConfigError(f"loading took longer than --startup-timeout {timeout:g}")
        loading.result()
        return True

    def greet(self) -> None:
        """What the operator should know before the first request."""
        config = self.state.config
        if config.model.trust_remote_code:
            log.warning("--trust-remote-code has no effect: no code of a model folder ever runs")
        if config.chat.enable_auto_tool_choice:
            log.info("--enable-auto-tool-choice is not needed: tool_choice auto has no switch here")
        if config.server.enable_log_requests or config.server.enable_log_outputs:
            log.warning("clients' words are written to the log: --enable-log-requests or --enable-log-outputs is on")
        if not self.state.keys and not config.is_loopback:
            log.warning("no --api-key is set and %s is not a loopback address: anybody who reaches it may use it",
                        config.server.host)  # fmt: skip

    async def drain(self) -> None:
        """Finishes what runs, within the timeout; the rest is told that the server is going."""
        state, server = self.state, self.state.config.server
        if state.phase == "ready" and server.shutdown_delay:
            state.phase = "leaving"
            await self.hurry_or(asyncio.sleep(server.shutdown_delay))
        if state.phase in ("ready", "leaving"):
            state.phase = "draining"
        log.info("draining: %d requests are open", len(state.open_exchanges))
        await self.hurry_or(self.quiet(server.shutdown_timeout))
        for exchange in list(state.open_exchanges):
            exchange.cancel()
        await self.quiet(2.0)

    async def quiet(self, seconds: float) -> None:
        """Until no request is open, or the time is over."""
        self.state.idle.set() if not self.state.open_exchanges else self.state.idle.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.state.idle.wait(), seconds)

    async def hurry_or(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Waits, unless a second signal comes."""
        task = asyncio.ensure_future(waiting)
        hurry = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait({task, hurry}, return_when="FIRST_COMPLETED")
        for future in (task, hurry):
            future.cancel()
        await asyncio.gather(task, hurry, return_exceptions=True)

    async def close(self, serving: asyncio.Task[None]) -> None:
        """Sockets, engine, threads; each with a timeout."""
        last_resort(3 * JOIN_S)
        self.listener.stop_now()
        state = self.state
        state.stop_fetching.set()
        if state.fetching is not None:  # gives up, so that no half of a file stays behind
            await asyncio.get_running_loop().run_in_executor(None, wait, [state.fetching], FETCH_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, JOIN_S)
        tasks = self.listener.server_state.tasks
        if tasks:
            await asyncio.wait(tasks, timeout=2)
        if state.media is not None:
            await state.media.close()
        if getattr(state, "engine", None) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(state.engine.stop(0.0), JOIN_S)
        state.pool.shutdown(wait=False, cancel_futures=True)
        if state.config.server.uds:
            with contextlib.suppress(OSError):
                os.unlink(state.config.server.uds)

    def on_signal(self) -> None:
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()

    def on_hangup(self) -> None:
        """Reads the key file again; a bad file changes nothing."""
        try:
            self.state.keys.reload()
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)

    def on_death(self, error: BaseException) -> None:
        """The device thread is gone: its requests have been answered, the supervisor starts a new process."""
        log.error("the engine stopped working; exiting with %d", EXIT_DEAD, exc_info=error)
        self.state.phase = "dead"
        self.exit_status = EXIT_DEAD
        self.stopping.set()


def freeze_heap() -> None:
    """What has been loaded stays: garbage collections look at it no more.

    Ended requests leave no garbage (tests/end_to_end/test_no_garbage.py), so a collection finds next to nothing. It
    looks at what was made since the last one and still lives: 2,000 objects take a quarter of a millisecond. The older
    ones, all that open requests hold, are looked at a hundred times less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 100, 100)


def last_resort(seconds: float) -> None:
    """Ends the process when something of ours, or a library's thread, does not let it end."""

    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(EXIT_STUCK)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def describe(config: Config) -> Iterator[str]:
    """`python -m server info`: versions, device, model."""
    import platform

    import torch

    from engine.models.registry import family_of, load_model_config
    from server import __version__
    from server.load import check_folder, hub_of, located

    yield f"omniloop {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    if torch.cuda.is_available():
        for at in range(torch.cuda.device_count()):
            yield f"device {at}: {torch.cuda.get_device_name(at)}"
    else:
        yield "device: cpu"
    folder = located(config, config.folder, hub_of(config), weights=False)
    check_folder(folder)
    model = load_model_config(folder, config.model.hf_overrides, config.without_media)
    text = model.text
    named = f"{model.architecture} ({family_of(model.architecture).name})"
    yield f"model: {named}, {len(text.layers)} layers of {text.hidden_size}, vocabulary {text.vocab_size}"
    yield f"takes {', '.join(model.modalities)}; context of {model.max_position} tokens; named {config.model_names[0]}"
