"""Hosted: the app with its lifespan, for servers that are not `python -m server`: uvicorn, hypercorn, Ray Serve.

Owner: the host's loop. In: flags as on the command line. Out: an ASGI app. The host binds the socket, parses HTTP and
handles signals. `lifespan.startup` loads and warms up, and completes when the model can answer; `lifespan.shutdown`
waits for running requests and closes. Paths are read after the host's `root_path`, so that the app can be mounted.
Streams have the same frames, with one ASGI message per step.

    uvicorn --factory server.hosted:hosted --port 8000
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from engine.base.errors import ConfigError
from engine.device.host_memory import memory_limit
from server.app import make_app
from server.cli import parse
from server.flags.command_line import UsageError
from server.flags.config import Config, LimitsConfig, ServerConfig
from server.http.leaving import Leaving
from server.http.protocol import LEAVING
from server.start.budgets import fitted
from server.start.lifespan import Lifespan
from server.state import AppState

log = logging.getLogger("omniloop")

# Flags that only a server which binds its socket and parses HTTP itself can implement.
OF_THE_HOST = (
    *("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "shutdown_delay"),
    *("max_header_bytes", "max_headers", "max_target_bytes", "header_timeout", "keepalive_timeout", "max_connections"),
)


def hosted(*flags: str) -> Hosted:
    """The app for these flags; raises UsageError and ConfigError before anything is loaded."""
    command, config = parse(flags)
    if command != "serve":
        raise UsageError(f"{command}: is a command of the command line; an app takes flags only")
    return Hosted(config)


class Hosted:
    """An ASGI app with a lifespan. Owner: the host's loop."""

    def __init__(self, config: Config, on_ready: Callable[[], None] | None = None) -> None:
        """`on_ready` is called once everything is loaded, before `lifespan.startup.complete` is sent."""
        self.on_ready = on_ready
        refuse_flags_of_the_host(config)
        self.state = AppState(fitted(config, memory_limit()))
        self.lifespan = Lifespan(self.state)
        self.app = make_app(self.state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) if scope["path"].startswith(f"{root}/") else scope["path"]
        inner = {**scope, "path": path, "root_path": ""}
        if scope["type"] != "http":
            await self.app(inner, receive, send)
            return
        leaving = Leaving(receive)
        extensions = {**scope.get("extensions", {}), LEAVING: leaving.watch}
        try:
            await self.app({**inner, "extensions": extensions}, receive, send)
        finally:
            await leaving.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Serve one lifespan, from startup to shutdown; if the host cancels it, everything is closed too."""
        await receive()
        lifespan = self.lifespan
        try:
            failure = await self._start()
            if not failure:
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await lifespan.drain()
        finally:
            await lifespan.close()
        if failure:
            await send({"type": "lifespan.startup.failed", "message": f"omniloop: {failure}"})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> str:
        """The reason why the model cannot be served; empty if it can be served."""
        try:
            await self.lifespan.start()
        except ConfigError as error:
            return str(error)
        except Exception as error:  # on an exception here, a host may assume an app without a lifespan, and continue
            log.error("the start failed", exc_info=error)
            return f"the start failed with {type(error).__name__}; the log has more"
        if self.state.phase != "ready":
            return "the engine stopped working while it was loaded"
        if self.on_ready is not None:
            self.on_ready()
        return ""


def refuse_flags_of_the_host(config: Config) -> None:
    """Raise UsageError for a flag that would have no effect."""
    for group, defaults in ((config.server, ServerConfig()), (config.limits, LimitsConfig())):
        for name in OF_THE_HOST:
            if getattr(group, name, None) != getattr(defaults, name, None):
                raise UsageError(
                    f"--{name.replace('_', '-')}: has no effect in a hosted app; set it at the host, which "
                    "listens and parses"
                )
