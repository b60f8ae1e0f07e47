"""Lifespan: load, drain and close everything behind an app, for any host.

Owner: loop. In: an AppState in phase starting. Out: the same AppState, first ready, later drained and closed. Start:
text and engine load in parallel threads and warm up. Stop: probes answer 503, new work is refused, running requests may
finish, the rest is aborted, and engine and threads end. Sockets, signals and exit codes belong to the host
(server/start/process.py, server/hosted.py).

    [engine: device thread | text, media: pool] -- ready -- stop() -- drain -- close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any

from engine.base.errors import ConfigError
from engine.engine import Engine
from mm.transform import quiet
from server.ops import ledger, logs, tracing
from server.ops.canary import Canary
from server.ops.memory_watch import MemoryWatch
from server.ops.metrics import memory_families
from server.ops.otel import Spans
from server.ops.status import StatusLine
from server.start import budgets, floors, folders, load
from server.start.batches import begin_batches
from server.state import AppState

log = logging.getLogger("omniloop")

JOIN_S = 10.0  # seconds for threads and sockets to end after the drain
FETCH_S = 2.0  # seconds for a download to stop, which it does when bytes arrive
IDLE_S = 5.0  # seconds without an open request before libraries for later requests are imported
POOL_S = 2.0  # seconds for the pool's threads to end; an import of librosa or a decoder may take longer
ANSWERED_S = 2.0  # seconds to send the answers of requests that the drain aborts


class Lifespan:
    """Owner: loop. `stopping` is set once a stop is requested or the engine is dead; `hurry` by a second
    request to stop.
    """

    def __init__(self, state: AppState) -> None:
        self.state = state
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self.status: StatusLine | None = None
        self.cut_short = False  # threads load or import something, and cannot be interrupted: nothing waits for them
        self.preparing: asyncio.Future[None] | None = None
        self.exhausted = False  # memory is exhausted, so a new process is needed
        self.memory = MemoryWatch(state, self.on_exhaustion)

    def stop(self) -> None:
        """The host requests a stop; a second call ends the wait for running requests."""
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()

    async def start(self) -> None:
        """Load everything; afterwards the phase is ready, unless `stop` ended the loading. Raises ConfigError."""
        begun = time.perf_counter()
        state, config = self.state, self.state.config
        floors.check()
        self.greet()
        if config.traces.trace:
            tracing.check_place(config.traces.trace)
        if config.traces.otlp_traces_endpoint:
            state.spans = Spans(config.traces.otlp_traces_endpoint)
        if config.batches.files_dir:  # before the model is loaded, because another server may use the folder
            state.batches.open()
        if not await self.unless_stopped(folders.fetch(state), None):
            return
        engine = state.engine = Engine(config.engine(state.folder, state.download.drafter))
        engine.on_death = self.on_death
        if not await self.unless_stopped(load.load(state), config.server.startup_timeout):
            return
        if config.traces.trace:
            tracing.begin(state)
        state.phase = "ready"
        if "audio" in state.engine.model.modalities:
            self.preparing = asyncio.ensure_future(self.prepare_recordings(IDLE_S))
        logs.log_startup({**state.startup, **state.engine.startup}, time.perf_counter() - begun)
        self.memory.start()
        budgets.report(self.state.config, self.memory.limit)
        state.metrics.others.append(lambda: memory_families(self.memory.numbers()))
        begin_batches(state)
        state.canary = canary = Canary(engine, config.health.canary_interval)
        canary.start()
        if engine.config.faults is not None:
            log.warning("--debug-faults is on: whoever may post to /debug/faults can make this server fail")
        if not config.server.disable_log_stats:
            self.status = StatusLine(state)
            self.status.start()

    async def prepare_recordings(self, idle: float) -> None:
        """Import the libraries that cut recordings while no request is open: the import occupies the
        interpreter for 2 s.
        """
        await asyncio.sleep(idle)
        if self.state.open_exchanges:
            self.state.idle.clear()
            await self.state.idle.wait()
        await asyncio.get_running_loop().run_in_executor(self.state.pool, quiet.prepare)

    async def unless_stopped(self, work: Coroutine[Any, Any, None], timeout: float | None) -> bool:
        """Run a part of the start; False if `stop` came before its end, or before its beginning."""
        if self.stopping.is_set():
            work.close()
            self.cut_short = True
            return False
        loading = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait({loading, stopped}, timeout=timeout, return_when="FIRST_COMPLETED")
        stopped.cancel()
        if not loading.done():
            self.cut_short = True
            loading.cancel()
            if self.stopping.is_set():
                return False
            raise ConfigError(f"loading took longer than --startup-timeout {timeout:g}")
        loading.result()
        return True

    def greet(self) -> None:
        """Log what the operator should know before the first request."""
        config = self.state.config
        if config.model.trust_remote_code:
            log.warning("--trust-remote-code has no effect: code in a checkpoint never runs")
        if config.chat.enable_auto_tool_choice:
            log.info("--enable-auto-tool-choice has no effect: tool_choice auto always works")
        if config.server.enable_log_requests or config.server.enable_log_outputs:
            log.warning(
                "prompts or answers are written to the log (--enable-log-requests, "
                "--enable-log-outputs): they hold the words of clients"
            )

    async def drain(self) -> None:
        """Let running requests finish within the timeout, then abort the rest with an error."""
        state, server = self.state, self.state.config.server
        await state.batches.stop()
        if state.phase == "ready" and server.shutdown_delay:
            state.phase = "leaving"
            await self.hurry_or(asyncio.sleep(server.shutdown_delay))
        if state.phase in ("ready", "leaving"):
            state.phase = "draining"
        state.resume()  # requests that an operator paused must finish too
        log.info("draining: %d requests are open", len(state.open_exchanges))
        for exchange in list(state.open_exchanges):
            exchange.drain()
        await self.hurry_or(self.quiet(server.shutdown_timeout))
        for exchange in list(state.open_exchanges):
            exchange.cancel()
        await self.quiet(ANSWERED_S)
        if state.phase == "draining" and getattr(state, "engine", None) is not None:
            held = await ledger.settled(state.ledger)
            words = ", ".join(f"{name} {count}" for name, count in held.items())
            log.log(logging.WARNING if held else logging.INFO, "drained: %s", words or "nothing is held")

    async def quiet(self, seconds: float) -> None:
        """Wait until no request is open, but at most `seconds`."""
        self.state.idle.set() if not self.state.open_exchanges else self.state.idle.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.state.idle.wait(), seconds)

    async def hurry_or(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait until `waiting` ends or a second `stop` comes."""
        task = asyncio.ensure_future(waiting)
        hurry = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait({task, hurry}, return_when="FIRST_COMPLETED")
        for future in (task, hurry):
            future.cancel()
        await asyncio.gather(task, hurry, return_exceptions=True)

    async def close(self) -> None:
        """Close download, media, engine and threads, each with a timeout."""
        state = self.state
        if self.status is not None:
            self.status.stop()
        if self.preparing is not None:
            self.preparing.cancel()
        self.memory.close()
        if state.canary is not None:
            state.canary.close()
        if state.experts is not None:
            state.experts.close()
        if state.config.traces.trace and state.trace is not None:
            await tracing.write(state, state.config.traces.trace)
        if state.spans is not None:
            await asyncio.get_running_loop().run_in_executor(None, state.spans.close)
        state.download.stop.set()
        if state.download.running is not None:  # it stops, so that no partial file remains
            await asyncio.get_running_loop().run_in_executor(None, wait, [state.download.running], FETCH_S)
        if state.media is not None:
            await state.media.close()
        if getattr(state, "engine", None) is not None and not self.cut_short:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(state.engine.stop(0.0), JOIN_S)
        if state.grammars is not None:
            state.grammars.close()
        await state.batches.stop()
        state.batches.files.folder.close()
        state.pool.shutdown(wait=False, cancel_futures=True)
        ended = asyncio.get_running_loop().run_in_executor(None, state.pool.shutdown)
        if not (await asyncio.wait([ended], timeout=POOL_S))[0]:
            self.cut_short = True

    def on_exhaustion(self) -> None:
        """The process has used nearly all the memory it may have: stop it in an orderly way."""
        self.exhausted = True
        self.stop()

    def on_death(self, error: BaseException) -> None:
        """The device thread has ended: its requests have been answered, and a supervisor should start a new process."""
        log.error("the engine stopped working", exc_info=error)
        self.state.phase = "dead"
        self.stopping.set()
