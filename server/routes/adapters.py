"""/v1/load_lora_adapter and /v1/unload_lora_adapter, and SGLang's two routes; only with --enable-runtime-lora.

Owner: loop; files are read in the pool. In: a name and a path: of a folder below --lora-dir, or ORG/NAME on the hub
with --lora-hub. Out: vLLM's lines of text, or SGLang's JSON object. These routes need the admin key if there is one,
and there must be one if the server listens beyond loopback (SECURITY S34).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.base.errors import AdapterBusyError, AdapterError, ConfigError
from engine.lora.home import Home
from engine.lora.source import Source
from server.errors import adapter_refused, invalid, not_found, queue_full, quoted
from server.flags.lora_flags import checked_hash, checked_name
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.routes.dev import guarded
from server.routes.endpoint import json_response, route
from server.schema.lora import LoadAdapterBody, UnloadAdapterBody
from server.state import AppState


async def load(request: Request) -> Response:
    """Load an adapter; vLLM's answer."""
    name = await loaded(request)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: Request) -> Response:
    """Forget an adapter; vLLM's answer."""
    name = await unloaded(request)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def load_as_sglang(request: Request) -> Response:
    """Load an adapter; SGLang's answer."""
    await loaded(request)
    return listing(state_of(request))


async def unload_as_sglang(request: Request) -> Response:
    """Forget an adapter; SGLang's answer."""
    await unloaded(request)
    return listing(state_of(request))


def listing(state: AppState) -> Response:
    """All adapters by name, with their sources."""
    loaded = {each.name: each.source.root for each in home_of(state).names}
    return json_response({"success": True, "loaded_adapters": loaded})


async def loaded(request: Request) -> str:
    """Load the adapter of a body; returns its name."""
    state = state_of(request)
    body = await read_json(request, LoadAdapterBody, state.config.limits.max_text_request_bytes)
    name = given("lora_name", body.lora_name)
    path = given("lora_path", body.lora_path)
    try:
        checked_name(name)
    except ValueError as error:
        raise invalid("lora_name", f"lora_name: {error}") from None
    try:
        sha256 = checked_hash(body.sha256 or "")
    except ValueError as error:
        raise invalid("sha256", str(error)) from None
    exchange_of(request).details["adapter"] = name
    if name in state.names:
        raise invalid("lora_name", f"lora_name: {quoted(name)} is the name of the base model; choose another")
    home = home_of(state)
    try:
        source = await located(state, home, path, sha256)
        await home.add(name, source, replace=bool(body.load_inplace))
    except AdapterBusyError as error:
        raise queue_full(state.places.retry_after(), str(error)) from None
    except AdapterError as error:
        raise adapter_refused(error, "lora_path", f"lora_path {quoted(path)}: ") from None
    except ConfigError as error:
        raise invalid("lora_path", f"lora_path: {error}", "adapter_invalid") from None
    return name


async def unloaded(request: Request) -> str:
    """Forget the adapter of a body; returns its name."""
    state = state_of(request)
    body = await read_json(request, UnloadAdapterBody, state.config.limits.max_text_request_bytes)
    name = given("lora_name", body.lora_name)
    if not home_of(state).remove(name):
        raise not_found(f"lora_name: there is no adapter {quoted(name)}", "lora_name")
    exchange_of(request).details["adapter"] = name
    return name


async def located(state: AppState, home: Home, path: str, sha256: str) -> Source:
    """The Source of a path that a client named."""
    if home.fetched is not None:
        source = await asyncio.get_running_loop().run_in_executor(state.pool, home.fetched, path)
        if source is not None:
            return replace(source, sha256=sha256)
    folder = state.config.lora.lora_dir
    if not folder:
        raise AdapterError(f"{quoted(path)} is not ORG/NAME on the hub, and there is no --lora-dir", missing=True)
    root = path.removeprefix(f"{folder.rstrip('/')}/")
    return Source(path, folder, root.rpartition("/")[2] if root.startswith("/") else root, sha256)


def home_of(state: AppState) -> Home:
    """The adapters; the flags of these routes make a Home."""
    assert state.adapters is not None
    return state.adapters


def given(field: str, text: str | None) -> str:
    """A text that must not be missing or empty."""
    if not text:
        raise invalid(field, f"{field}: is missing and required")
    return text


ROUTES = [
    route("/v1/load_lora_adapter", guarded(load), "POST"),
    route("/v1/unload_lora_adapter", guarded(unload), "POST"),
    route("/load_lora_adapter", guarded(load_as_sglang), "POST"),
    route("/unload_lora_adapter", guarded(unload_as_sglang), "POST"),
]
