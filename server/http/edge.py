"""The cheap checks, in order of cost: headers, host, origin, key; then whether the server is ready for work.

Owner: loop. Everything here reads scope["path"] and raw headers, never a URL rebuilt from them (SECURITY S1), and
denies by default: the open paths are listed, all others need a key if keys are set. Browsers get CORS headers only for
listed origins (S6).
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, quoted, unavailable
from server.http.exchange import PROBES
from server.ops.limits import ADMIN, presented_key, wrong_key

if TYPE_CHECKING:
    from server.http.exchange import Exchange
    from server.state import AppState

HEADER_NAME = re.compile(rb"[a-z0-9-]{1,64}")
# Headers that pages may read.
EXPOSED = b"x-request-id, request-id, retry-after, x-structured-relaxed, x-replaced-frames, x-ignored-fields"
LOOPBACK = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})


class Edge:
    """Refuses requests that must not reach a handler."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self.app = app
        self.state = state
        server = state.config.server
        self.hosts = frozenset(host.lower().encode() for host in server.allowed_hosts)
        if not self.hosts and state.config.is_loopback and not server.uds:
            self.hosts = LOOPBACK
        self.origins = frozenset(origin.encode() for origin in server.allowed_origins)
        self.any_origin = "*" in server.allowed_origins
        self.has_page = not server.disable_playground
        self.has_docs = not server.disable_docs
        self.open_paths = PROBES - {"/metrics"} if server.metrics_require_key else PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        host, origin, asked = one_of_each(scope)
        if self.hosts and host_name(host) not in self.hosts:
            raise ApiError(421, "host_not_allowed", "this server does not answer for that host (--allowed-hosts)")
        if origin:
            self.check_origin(exchange, origin, host)
        if exchange.method == "OPTIONS":
            await self.preflight(exchange, scope, bool(origin and asked))
            return
        if self.state.keys and not self.is_open(exchange.method, scope["path"]):
            self.check_key(exchange, scope)
        await self.app(scope, receive, send)

    def check_origin(self, exchange: Exchange, origin: bytes, host: bytes) -> None:
        server = self.state.config.server
        if self.any_origin or origin in self.origins:
            allowed = origin if not self.any_origin else b"*"
            exchange.headers.append((b"access-control-allow-origin", allowed))
            exchange.headers.append((b"access-control-expose-headers", EXPOSED))
            if not self.any_origin:
                exchange.headers.append((b"vary", b"origin"))
            if server.allow_credentials:
                exchange.headers.append((b"access-control-allow-credentials", b"true"))
        elif (
            exchange.method not in ("GET", "HEAD", "OPTIONS")
            and (not self.state.keys or self.state.config.is_loopback)
            and not self.is_own(origin, host)
        ):
            raise ApiError(403, "origin_not_allowed", "this origin is not on the server's list (--allowed-origins)")

    def is_own(self, origin: bytes, host: bytes) -> bool:
        """Whether the origin is our own page: it equals the requested host, which is an address or a name known to be
        ours.

        The requesting page may have pointed any other name at our address (DNS rebinding).
        """
        if origin.partition(b"://")[2].lower() != host.lower():
            return False
        name = host_name(host)
        return name in self.hosts or name in LOOPBACK or is_address(name)

    async def preflight(self, exchange: Exchange, scope: Scope, asked: bool) -> None:
        """Answer OPTIONS, which needs no key; a browser's preflight gets the CORS headers."""
        server = self.state.config.server
        headers = []
        if asked and any(name == b"access-control-allow-origin" for name, _ in exchange.headers):
            headers = [
                (b"access-control-allow-methods", ", ".join(server.allowed_methods).encode()),
                (b"access-control-allow-headers", b", ".join(self.headers_for(scope))),
                (b"access-control-max-age", b"600"),
            ]
        exchange.route = "options"
        await exchange.answer(200, b"", headers)

    def headers_for(self, scope: Scope) -> list[bytes]:
        """The headers that a browser may send: the listed names, and requested names that match a listed `name-*` or
        `*`.

        Patterns are not sent: browsers know only the pattern `*`, which excludes `authorization`.
        """
        listed = [name.lower().encode() for name in self.state.config.server.allowed_headers]
        families = tuple(name[:-1] for name in listed if name.endswith(b"*"))
        wanted = b",".join(value for name, value in scope["headers"] if name == b"access-control-request-headers")
        names = [name for name in listed if not name.endswith(b"*")]
        for name in (word.strip().lower() for word in wanted.split(b",")):
            if name.startswith(families) and name not in names and HEADER_NAME.fullmatch(name):
                names.append(name)
        return names

    def check_key(self, exchange: Exchange, scope: Scope) -> None:
        keys = self.state.keys
        presented = presented_key(scope)
        name = keys.match(presented) if presented else None
        if name is None and presented and self.state.admin_keys.match(presented):
            name = ADMIN
        if name is None:
            self.state.wrong_keys.note(self.state.proxies.client_of(scope))
            raise wrong_key()
        exchange.key_name = name

    def is_open(self, method: str, path: str) -> bool:
        """Whether a path needs no key: probes, and the pages with their files, which ask the user for the key."""
        if path in self.open_paths or (method == "HEAD" and path == "/"):
            return True
        if self.has_page and (path == "/" or path.startswith("/playground/")):
            return True
        return self.has_docs and (path == "/docs/api" or path.startswith("/docs/api/"))


def one_of_each(scope: Scope) -> tuple[bytes, bytes, bytes]:
    """(host, origin, requested CORS method). Refuses a repeated Host or Content-Length, and a rank other than 0."""
    host = origin = asked = length = b""
    for name, value in scope["headers"]:
        if name == b"host":
            if host:
                raise ApiError(400, "invalid_request", "the Host header came twice", close=True)
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"content-length":
            if length:
                raise ApiError(400, "invalid_request", "the Content-Length header came twice", close=True)
            length = value
        elif name == b"access-control-request-method":
            asked = value
        elif name == b"x-data-parallel-rank":
            check_rank(value)
    return host, origin, asked


def check_rank(value: bytes) -> None:
    """Check X-Data-Parallel-Rank, by which a router selects an engine behind this address; a server has one, rank 0."""
    if not re.fullmatch(rb"0{1,9}", value.strip()):
        raise ApiError(
            400,
            "invalid_parameter",
            f"X-Data-Parallel-Rank: got {quoted(value.decode('latin1'))}; this server has one engine: send 0, or "
            "leave the header out",
        )


def host_name(host: bytes) -> bytes:
    """The host without its port, in lower case."""
    if host.startswith(b"["):
        return host[: host.find(b"]") + 1].lower()
    return host.partition(b":")[0].lower()


def is_address(name: bytes) -> bool:
    """Whether this is an IP address, in the form that a browser sends."""
    try:
        ipaddress.ip_address(name.decode("latin1").strip("[]"))
    except ValueError:
        return False
    return True


class Gate:
    """Answers 503 on every route except liveness while the server starts, drains or is dead; /metrics works
    until the end.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        phase, path = self.state.phase, scope["path"]
        if phase in ("ready", "leaving") or path == "/health/live" or (phase == "draining" and path == "/metrics"):
            await self.app(scope, receive, send)
            return
        scope["exchange"].route = path if path in PROBES else "gate"
        raise not_ready(phase)


def not_ready(phase: str) -> ApiError:
    texts = {
        "starting": "the model is still being loaded; try again shortly",
        "leaving": "the server is about to shut down",
        "draining": "the server is shutting down",
        "dead": "the engine stopped working; this server is restarting",
        "stalled": "the engine does not answer",
        "wrong": "the engine's answer to a check was not the one that it gave before",
        "decoding": "media that do not end being decoded hold the server's threads",
    }
    reason = {"dead": "engine_dead", "leaving": "draining", "decoding": "stalled", "wrong": "stalled"}.get(phase, phase)
    return unavailable(reason, texts[phase], 2 if phase == "starting" else 5)
