"""/api/version, /api/tags, /api/ps and /api/show: the served model in Ollama's words; and refusals to manage models.

Owner: loop. Out: one JSON body. The model is chosen when the server starts, and stays loaded.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.dialects.ollama.checkpoint import capabilities, details, entry, files_of, numbers, parameters
from server.dialects.ollama.frames import moment
from server.dialects.ollama.names import model_of
from server.dialects.ollama.schema import OllamaShowBody
from server.errors import not_here
from server.http.body import read_json
from server.http.exchange import state_of
from server.routes.endpoint import json_response, route

VERSION = "0.40.4"  # Ollama's version whose protocol is spoken; clients compare it
NEVER = "9999-12-31T23:59:59Z"
MANAGING = "this server serves the model that it was started with, and neither downloads, makes nor removes models"


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """The served names."""
    state = state_of(request)
    files = await files_of(state)
    return json_response({"models": [entry(state, files, name) for name in state.names]})


async def running(request: Request) -> Response:
    """The served names, which are always loaded."""
    from engine.device.host import choose_device  # its torch is imported when the socket is bound

    state = state_of(request)
    files = await files_of(state)
    more = {
        "expires_at": NEVER,
        "size_vram": 0 if choose_device(state.engine.config.device) == "cpu" else files.size,
        "context_length": state.engine.max_model_len,
    }
    return json_response({"models": [entry(state, files, name) | more for name in state.names]})


async def show(request: Request) -> Response:
    """Facts about a name."""
    state = state_of(request)
    body = await read_json(request, OllamaShowBody, state.config.limits.max_text_request_bytes, any_type=True)
    model_of(state, body.model or body.name)
    files, template = await files_of(state), state.renderer.template
    return json_response(
        {
            "details": details(state, files),
            "template": "" if template is None else template.source,
            "parameters": parameters(state),
            "model_info": numbers(state, files),
            "capabilities": capabilities(state),
            "modified_at": moment(files.modified or state.created),
            "license": files.license,
        }
    )


async def manage(request: Request) -> Response:
    """Refuse to change the served models; the body is not read."""
    raise not_here(None, MANAGING)


ROUTES = [
    route("/api/version", version, "GET"),
    route("/api/tags", tags, "GET"),
    route("/api/ps", running, "GET"),
    route("/api/show", show, "POST"),
    *(route(f"/api/{verb}", manage, "POST") for verb in ("pull", "push", "create", "copy")),
    route("/api/delete", manage, "DELETE"),
    route("/api/blobs/{digest}", manage, "HEAD", "POST"),
]
