"""Injects faults into handlers and decoders (engine/base/faults); used only with --debug-faults.

Owner: loop for handlers, threads of the pool for decoders. In: the armed faults. Out: a handler that raises or is slow,
a decoder that raises or hangs, or decoding processes that crash.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.base.faults import Faults

if TYPE_CHECKING:
    from engine.engine import Engine
    from mm.load import MediaLoader


class Loading(Protocol):
    """AppState, whose engine is set after loading."""

    engine: Engine


def faults_of(state: Loading) -> Faults | None:
    """The armed faults of tests; None without --debug-faults, and while the engine loads."""
    engine = getattr(state, "engine", None)
    return None if engine is None else engine.config.faults


def into_handlers(app: ASGIApp, armed: Callable[[], Faults | None]) -> ASGIApp:
    """The app with a fault point before each answer; `armed` returns None while the engine loads."""

    async def planted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and (faults := armed()) is not None:
            await asyncio.to_thread(faults.at, "handler")
        await app(scope, receive, send)

    return planted


def into_decoders(media: MediaLoader, faults: Faults) -> None:
    """Add a fault point before each decoding."""

    def begins() -> None:
        for pid in media.helpers.pids() if faults.takes("decoder", "crash") else ():
            os.kill(pid, signal.SIGSEGV)
        faults.at("decoder")

    media.planted = begins
