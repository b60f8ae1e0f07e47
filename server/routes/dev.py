"""Operator routes of a running server: pause, clear caches, show settings; only with --enable-dev-endpoints.

Owner: loop. These routes need the admin key if there is one, and there must be one if the server listens beyond
loopback (SECURITY S3). A server behind a proxy listens on loopback, and all clients' requests come from there. Nothing
here loads tensors, calls a method by name or edits weights. Sleeping would free an accelerator's memory; on a CPU there
is none.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from engine.base.errors import NotReadyError
from server import __version__
from server.errors import ApiError, from_engine, invalid, not_here, quoted
from server.http.exchange import exchange_of, state_of
from server.http.watch import client_present
from server.ops import ledger, tracing
from server.ops.limits import presented_key
from server.routes.endpoint import Handler, json_response, route
from server.state import AppState

# Paths, addresses of files and secrets, which no answer may contain.
HIDDEN = {
    "api_key", "api_key_file", "admin_api_key", "uds", "ssl_keyfile", "ssl_certfile", "model", "tokenizer",
    "download_dir", "hf_token", "tool_parser_plugin", "reasoning_parser_plugin",
    "trace", "otlp_traces_endpoint",
    "chat_template", "default_chat_template_kwargs", "allowed_local_media_path", "root_path", "served_model_name",
}  # fmt: skip
MODES = ("abort", "wait", "keep")
LOOK_S = 0.02  # seconds between two checks of answers that have left the engine


def guarded(handler: Handler) -> Handler:
    """The handler, for callers with the admin key or on loopback."""

    async def checked(request: Request) -> Response | None:
        exchange = exchange_of(request)
        if exchange.state.admin_keys or not exchange.state.config.is_loopback:
            check_admin(exchange.state, request.scope)
        return await handler(request)

    return checked


def check_admin(state: AppState, scope: Scope) -> None:
    """Raise 403 without the admin key, and 429 for an address that keeps guessing it."""
    presented = presented_key(scope)
    if presented is None or state.admin_keys.match(presented) is None:
        state.wrong_keys.note(state.proxies.client_of(scope))
        raise ApiError(403, "admin_only", "this route needs the key given with --admin-api-key")


async def pause(request: Request) -> Response:
    """Pause: mode=abort ends running answers, wait lets them finish, keep freezes them; new requests wait
    until /resume.
    """
    state = state_of(request)
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise invalid("mode", f"mode: got {quoted(mode)}; must be one of {', '.join(MODES)}")
    state.running.clear()
    if mode == "keep":
        state.engine.pause()
        return json_response({"status": "paused"})
    state.engine.resume()  # after mode=keep: frozen answers could not end
    if mode == "abort":
        abort_all(state)
    async with client_present(request):
        await quiet_or_resumed(state)
    return json_response({"status": "paused"})


async def quiet_or_resumed(state: AppState) -> None:
    """Wait until nothing runs, or the pause has ended."""
    waiting = [asyncio.ensure_future(quiet(state)), asyncio.ensure_future(state.running.wait())]
    try:
        await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def quiet(state: AppState) -> None:
    """Wait until no answer is open: beam search and long recordings leave the engine between their requests."""
    while True:
        await state.engine.quiet()
        answers = [exchange.answer_open for exchange in state.open_exchanges]
        if all(answer is None or answer.done for answer in answers):
            return
        await asyncio.sleep(LOOK_S)


def abort_all(state: AppState) -> None:
    for exchange in list(state.open_exchanges):
        if exchange.answer_open is not None:
            exchange.answer_open.abort()


async def resume(request: Request) -> Response:
    state_of(request).resume()
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": not state_of(request).running.is_set()})


async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": False})


async def no_sleep(request: Request) -> Response:
    raise not_here(
        None,
        "this server does not sleep: its weights and its cache stay on the device until it stops; stop it to free them",
    )


async def start_profile(request: Request) -> Response:
    """Start a timeline, until /stop_profile; kernels=true also records an accelerator's kernels and copies."""
    state = state_of(request)
    kernels = request.query_params.get("kernels", "false")
    if kernels not in ("true", "false"):
        raise invalid("kernels", f"kernels: got {quoted(kernels)}; must be true or false")
    if state.trace is not None:
        raise ApiError(409, "profiling", "a timeline is being taken; end it with /stop_profile, or leave --trace out")
    try:
        if kernels == "true" and not await state.engine.start_profile():
            raise invalid("kernels", "kernels: this engine runs on a CPU; leave it out for the other threads' timeline")
    except NotReadyError as error:
        raise from_engine(error) from None
    tracing.begin(state)
    return json_response({"status": "profiling"})


async def stop_profile(request: Request) -> Response:
    """The timeline since /start_profile, as a file for ui.perfetto.dev."""
    state = state_of(request)
    if state.trace is None or state.config.traces.trace:
        raise ApiError(409, "not_profiling", "no timeline is being taken; begin one with /start_profile")
    try:
        state.trace.spans += await state.engine.stop_profile()
    except NotReadyError as error:
        raise from_engine(error) from None
    return Response(await tracing.end(state), media_type="application/json")


async def reset_prefix_cache(request: Request) -> Response:
    return await _succeeded(state_of(request).engine.reset_prefix_cache)


async def flush_cache(request: Request) -> Response:
    """Drop cached prefixes, as SGLang's clients want it; 400 while requests run, and clients ask again."""
    try:
        flushed = await state_of(request).engine.reset_prefix_cache()
    except NotReadyError as error:
        raise from_engine(error) from None
    if not flushed:
        raise invalid(None, "the cache is not flushed while requests run; ask again when they have ended", "busy")
    return Response(b"Cache flushed.\n", media_type="text/plain")


async def reset_encoder_cache(request: Request) -> Response:
    return await _succeeded(state_of(request).engine.reset_encoder_cache)


async def reset_mm_cache(request: Request) -> Response:
    media = state_of(request).media
    if media is not None:
        media.cache.clear()
    return json_response({"success": True})


async def _succeeded(work: Callable[[], Awaitable[bool]]) -> Response:
    try:
        return json_response({"success": await work()})
    except NotReadyError as error:
        raise from_engine(error) from None


async def server_info(request: Request) -> Response:
    """Version, settings as text or JSON, and what the server holds now; no paths, keys or environment."""
    exchange = exchange_of(request)
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise invalid("config_format", f"config_format: got {quoted(form)}; must be text or json")
    settings, counts = public(exchange.state), exchange.state.ledger()
    counts["exchanges"] -= 1  # without this request
    held = ledger.sorted_out(counts)
    if form == "json":
        return json_response({"version": __version__, "config": settings, "ledger": held})
    lines = [f"{group}.{name}={value}" for group, fields in settings.items() for name, value in fields.items()]
    return json_response({"version": __version__, "config": "\n".join(lines), "ledger": held})


def public(state: AppState) -> dict[str, dict[str, Any]]:
    """Every setting that is a number, a word or a list of these, without paths and secrets."""
    found: dict[str, dict[str, Any]] = {}
    for group in dataclasses.fields(state.config):
        fields = getattr(state.config, group.name)
        names = [field.name for field in dataclasses.fields(fields) if field.name not in HIDDEN]
        values = {name: getattr(fields, name) for name in names}
        kinds = bool | int | float | str | tuple | list | dict
        found[group.name] = {name: value for name, value in values.items() if isinstance(value, kinds)}
    found["engine"] = {
        "max_model_len": state.engine.max_model_len,
        "num_blocks": state.engine.num_blocks,
        "architecture": state.engine.model.architecture,
        "modalities": list(state.engine.model.modalities),
    }
    return found


def line(path: str, handler: Handler, method: str) -> Route:
    return route(path, guarded(handler), method)


ROUTES = [
    line("/pause", pause, "POST"),
    line("/resume", resume, "POST"),
    line("/is_paused", is_paused, "GET"),
    line("/sleep", no_sleep, "POST"),
    line("/wake_up", no_sleep, "POST"),
    line("/is_sleeping", is_sleeping, "GET"),
    line("/reset_prefix_cache", reset_prefix_cache, "POST"),
    line("/flush_cache", flush_cache, "GET"),
    line("/flush_cache", flush_cache, "POST"),
    line("/reset_mm_cache", reset_mm_cache, "POST"),
    line("/reset_encoder_cache", reset_encoder_cache, "POST"),
    line("/server_info", server_info, "GET"),
    line("/start_profile", start_profile, "POST"),
    line("/stop_profile", stop_profile, "POST"),
]
