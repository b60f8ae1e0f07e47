"""Probes, numbers and names: /health, /health/live, /health/ready, /ping, /version, /load, /metrics; / without a page.

Owner: loop. Ready means: loaded, warmed up, not shutting down, the device thread runs, the pool is not full of stuck
decoders. Live means: this loop runs and the device thread sends beats; a server that is still loading is live. Overload
affects neither (SECURITY S41).
"""

from __future__ import annotations

import asyncio
import re
import time

from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.http.edge import not_ready
from server.http.exchange import state_of
from server.ops.canary import WRONG
from server.ops.metrics import exposition
from server.routes.endpoint import json_response, route
from server.state import AppState

STUCK_S = 10.0  # a decoder stops sooner than this once its alarm is tripped


async def ready(request: Request) -> Response:
    state = state_of(request)
    if state.phase != "ready":
        raise not_ready(state.phase)
    if stalled(state):
        raise not_ready("stalled")
    if state.canary is not None and state.canary.wrong >= WRONG:
        raise not_ready("wrong")
    if decoders_stuck(state):
        raise not_ready("decoding")
    if state.grammars is None and state.config.model.structured_outputs_backend != "none":
        return Response(b"structured output is off: the log of the start says why")
    return Response(b"")


async def live(request: Request) -> Response:
    state = state_of(request)
    if state.phase == "dead":
        raise not_ready("dead")
    if state.phase in ("ready", "leaving") and stalled(state):
        raise not_ready("stalled")
    return Response(b"")


def stalled(state: AppState) -> bool:
    """Whether the device thread has been silent for longer than a step may take, or a canary has not been answered."""
    if state.canary is not None and state.canary.late:
        return True
    return time.monotonic() - state.engine.last_beat > state.config.scheduler.step_timeout


def decoders_stuck(state: AppState) -> bool:
    """Whether half of the pool's threads are stuck on media that no request waits for."""
    return state.media is not None and 2 * state.media.stuck_for(STUCK_S) >= state.config.pool_threads


def running() -> Response:
    """The answer to clients of Ollama, which look for this text at /."""
    return Response(b"Ollama is running", media_type="text/plain")


async def root(request: Request) -> Response:
    if not re.search("text/html|application/json", request.headers.get("accept", "")):
        return running()
    return json_response({"name": "omniloop", "version": __version__, "models": list(state_of(request).names)})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    """Requests that are being prepared, wait or run."""
    return json_response({"server_load": state_of(request).places.requests})


async def metrics(request: Request) -> Response:
    state = state_of(request)
    if state.experts is not None:
        state.experts.ask()
    body = await asyncio.get_running_loop().run_in_executor(state.pool, exposition, state.metrics)  # takes about 3 ms
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


ROUTES = [
    route("/health", ready, "GET"),
    route("/health/ready", ready, "GET"),
    route("/health/live", live, "GET"),
    route("/ping", ready, "GET", "POST"),
    route("/version", version, "GET"),
    route("/load", load, "GET"),
    route("/metrics", metrics, "GET"),
]
WITHOUT_PAGE = [route("/", root, "GET")]
