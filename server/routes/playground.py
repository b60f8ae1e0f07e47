"""The chat page at /, its files, and /about: facts about the model for the page. Off with --disable-playground.

Owner: loop. The files of server/playground are read once, in the pool, at the first request. The URL of a script or a
style contains a digest of all files: browsers cache such a file for a year, and a new version of the server has new
URLs. A browser requests the page itself each time (If-None-Match, 304). The page and its files need no key, since they
are equal on every server; /about needs one. The content policy lets the page fetch only from its own server and run
only its own files, and no text becomes HTML (require-trusted-types-for; SECURITY S6).
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.errors import not_found
from server.flags.config import EMBEDDED
from server.http.exchange import state_of
from server.routes.endpoint import json_response, route
from server.routes.health import running
from server.state import AppState

FOLDER = Path(__file__).parents[1] / "playground"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".ogg": "audio/ogg",
    ".mp4": "video/mp4",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "media-src": "'self' data: blob:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "form-action": "'none'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(self), geolocation=()",
}
A_YEAR = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Pages:
    """The chat page and the API's page, their files by path in the folder, and the digest of all files."""

    html: bytes
    api: bytes
    files: dict[str, bytes]
    digest: str


@cache
def pages() -> Pages:
    """Read the folder."""
    paths = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in (*TYPES, ".html"))
    found = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    digest = hashlib.sha256(b"".join(name.encode() + data for name, data in found.items())).hexdigest()[:16]
    html = found.pop("index.html").replace(b"{files}", f"playground/{digest}".encode())
    api = found.pop("api.html").replace(b"{files}", f"api/{digest}".encode())
    return Pages(html, api, found, digest)


async def page(request: Request) -> Response:
    """The page for browsers; other clients look for a server of Ollama's protocol here."""
    if "text/html" not in request.headers.get("accept", ""):
        return running()
    made = await read(request)
    found = html(request, made.html, made.digest)
    found.headers["vary"] = "accept"
    return found


def html(request: Request, content: bytes, digest: str) -> Response:
    """A page that browsers revalidate on each visit."""
    tag = f'"{digest}"'
    headers = {**HEADERS, "cache-control": "no-cache", "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


async def file(request: Request) -> Response:
    made = await read(request)
    name = request.path_params["name"]
    if request.path_params["digest"] != made.digest or name not in made.files:
        raise not_found("the page has no such file; load the page again")
    headers = {**HEADERS, "cache-control": A_YEAR}
    return Response(made.files[name], media_type=TYPES[Path(name).suffix], headers=headers)


async def read(request: Request) -> Pages:
    return await asyncio.get_running_loop().run_in_executor(state_of(request).pool, pages)


async def about(request: Request) -> Response:
    """Facts about the model. `page`: the digest by which an open page detects a new version of the server."""
    return json_response({**facts(state_of(request)), "page": (await read(request)).digest})


def facts(state: AppState) -> dict[str, Any]:
    """Facts about the model for the page, which hides controls that the server would refuse."""
    from engine.models.registry import family_of  # its torch is imported when the socket is bound

    model, renderer = state.engine.model, state.renderer
    task = task_of(state)
    modalities = {"chat": list(model.modalities), "transcription": ["audio"]}.get(task, ["text"])
    return {
        "version": __version__,
        "models": list(state.names),
        "family": family_of(model.architecture, model.implementation).name,
        "embedded": state.folder == str(EMBEDDED),
        "task": task,  # the kind of request that the page sends
        "modalities": modalities,
        "max_model_len": state.engine.max_model_len,
        "max_request_bytes": state.config.limits.max_request_bytes,
        "max_logprobs": state.config.limits.max_logprobs,
        "structured_outputs": state.grammars is not None,
        "tool_calls": task == "chat" and state.parsers.tools_name != "none",
        "fill_in_the_middle": task != "pooling" and renderer.fill_in is not None,
        "thinking_switch": any("enable_thinking" in template.source for template in renderer.templates.values()),
        "defaults": state.defaults,
    }


def task_of(state: AppState) -> str:
    """The kind of request that the page can send to the model."""
    if state.engine.limits.pools:
        return "pooling"
    if state.whisper is not None:
        return "transcription"
    chats = state.tokenizer.chat_format is not None or state.renderer.template is not None
    return "chat" if chats else "completion"


ROUTES = [
    route("/", page, "GET"),
    route("/playground/{digest}/{name:path}", file, "GET"),
    route("/about", about, "GET"),
]
