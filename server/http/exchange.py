"""Exchange: one HTTP request and its state; the outermost layer of the app.

Owner: loop. In: an ASGI request. Out: always a well-formed answer with X-Request-Id: an ApiError becomes its body, any
other error a fixed 500 text. At its end: one log line (no text, no URL query, no keys) and the HTTP metrics.

    Exchanges -> Edge (headers, host, origin, key) -> Gate (starting, draining) -> Router -> handler
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mm.errors import MediaError
from server.batches.inside import LINE_OF
from server.errors import ApiError, Protocol, from_media, from_render, internal, not_found, unavailable
from server.http.websocket import accepting, as_exchange_scope, refusing
from server.ops.proxies import home
from server.ops.request_times import Generation, RequestTimes
from server.render.errors import RenderError
from server.state import AppState, OpenAnswer

if TYPE_CHECKING:
    from engine.base.request import NamedAdapter
    from server.http.line import Line
    from server.ops.places import Kind, Place, Places

log = logging.getLogger("omniloop.access")
fault = logging.getLogger("omniloop.fault")

_LABEL = re.compile(rb"^[\x20-\x7e]{1,128}$")


class ClientGone(Exception):
    """The client closed the connection; no answer can be sent."""


def nothing() -> None:
    """Default of `on_drain`, and of `abort` on a server without our extension."""


def _not_now(piece: bytes) -> bool:
    """Default of `chunk`: a server without our extension takes pieces only through `send`."""
    return False


def _no_line() -> None:
    """Default of `line`: a server without our extension gives no access to its sockets."""


def _untold(call: Callable[[], None], wanted: bool) -> None:
    """Default of `watch`: a server without our extension does not report disconnects; it drops later writes."""


class Exchange:
    """One request until its answer has ended. Owner: loop."""

    __slots__ = (
        "abort",
        "adapter",
        "address",
        "answer_open",
        "answered",
        "arrival",
        "chunk",
        "details",
        "first_token",
        "generation",
        "headers",
        "key_name",
        "line",
        "method",
        "on_drain",
        "path",
        "place",
        "places",
        "protocol",
        "queued_s",
        "raw_send",
        "reason",
        "replaced_frames",
        "request_id",
        "route",
        "started",
        "state",
        "status",
        "submitted",
        "task",
        "watch",
    )

    def __init__(self, scope: Scope, send: Send, state: AppState) -> None:
        self.state = state
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.protocol = protocol_of(scope)
        self.raw_send = send
        extensions = scope.get("extensions", {})
        self.abort: Callable[[], None] = extensions.get("omniloop.abort", nothing)
        self.chunk: Callable[[bytes], bool] = extensions.get("omniloop.chunk", _not_now)
        self.line: Callable[[], Line | None] = extensions.get("omniloop.line", _no_line)
        self.watch: Callable[[Callable[[], None], bool], None] = extensions.get("omniloop.leaving", _untold)
        self.arrival = time.monotonic()
        self.request_id = request_label(scope)
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.request_id.encode())]
        self.route = "other"  # the route's template, once it is known
        self.key_name: str = scope.get(LINE_OF, "")
        # Lines of batches only use room that no other request needs.
        self.places: Places = state.batches.places if LINE_OF in scope else state.places
        self.adapter: NamedAdapter | None = None  # the adapter that the request named as its model
        self.place: Place | None = None  # its place among waiting and running requests
        self.address = state.proxies.client_of(scope)
        self.status = 0
        self.reason = ""
        self.started = False
        self.answered = False  # whether the last byte was passed to the connection
        self.first_token = 0.0
        self.submitted = 0.0  # time of submission to the engine
        self.queued_s = -1.0  # seconds from arrival to the first step; below 0: no step yet
        self.generation: Generation | None = None  # set if `state.follows_requests`
        self.details: dict[str, object] = {}  # counts and lengths for the log line
        # (video's number among the media, (unreadable frame, frame used in its place) pairs)
        self.replaced_frames: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.answer_open: OpenAnswer | None = None  # set while the engine works for it
        self.task = asyncio.current_task()
        self.on_drain: Callable[[], None] = nothing  # set by handlers that may wait for their client without a limit

    @property
    def client(self) -> str:
        """The client for queues and shares: its key's name, or its address if it sent no key. Trusted clients without a
        key count as one client."""
        return self.key_name or ("" if self.state.config.limits.trust_clients else home(self.address))

    @property
    def adapter_use(self) -> tuple[str, bool] | None:
        """The adapter's name, and whether a step has run; None: the base serves the exchange."""
        return None if self.adapter is None else (self.adapter.name, self.queued_s >= 0)

    def hold(self, count: int, kind: Kind = "answers") -> Place:
        """Reserve places for `count` choices, for a `with` block. Raises the 429."""
        weight = self.state.keys.weight(self.key_name)
        self.place = self.places.hold(count, self.client, kind, weight)
        return self.place

    def begin(self) -> None:
        """Note that a choice has had its first step."""
        if self.place is not None:
            self.place.begin()

    def drain(self) -> None:
        """The server accepts no more work: open answers continue; a handler that waits for its client's next
        input ends.
        """
        self.on_drain()

    def cancel(self) -> None:
        """The server shuts down: an open answer ends with an error, and a request in preparation is cancelled."""
        if self.answer_open is not None:
            self.answer_open.fail(unavailable("draining", "the server is shutting down"))
        elif self.task is not None:
            self.task.cancel()

    async def send(self, message: Message) -> None:
        """ASGI send for complete answers; streams use raw_send after their start."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
        elif not message.get("more_body", False):
            self.answered = True
        await self.raw_send(message)

    async def accept(self, scope: Scope) -> None:
        """Open a WebSocket; later errors are sent as events."""
        self.started, self.status = True, 101
        await self.raw_send(accepting(scope, self.headers))

    async def answer(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Send a complete answer."""
        sized = [*headers, (b"content-length", str(len(body)).encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": sized})
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, in the form of the client's protocol."""
        self.reason = error.reason
        if error.reason in self.state.metrics.rejections:
            self.state.metrics.rejections[error.reason] += 1
        headers = [(b"content-type", b"application/json")]
        headers += [(name.encode(), value.encode("ascii", "replace")) for name, value in error.headers.items()]
        if error.close:
            headers.append((b"connection", b"close"))
        body = error.body_in(self.protocol, self.request_id)
        await self.answer(error.status_in(self.protocol), body, headers)


def exchange_of(request: Request) -> Exchange:
    """The exchange of a handler's request."""
    return cast(Exchange, request.scope["exchange"])


def state_of(request: Request) -> AppState:
    """The server's state of a handler's request."""
    return exchange_of(request).state


def header_of(scope: Scope, name: bytes) -> str:
    """A header's value; "" without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def protocol_of(scope: Scope) -> Protocol:
    """The protocol whose form of errors the client reads."""
    path: str = scope["path"]
    if path.startswith("/api/"):
        return "ollama"
    if path in TEI_PATHS:
        return "tei"
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and header_of(scope, b"anthropic-version")):
        return "anthropic"
    return "openai"


def request_label(scope: Scope) -> str:
    """The client's X-Request-Id if it is printable ASCII of at most 128 characters; otherwise 32 hex characters."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _LABEL.match(value):
            return value.decode("ascii")
    return secrets.token_hex(16)


class Exchanges:
    """The outermost layer of the ASGI app."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            raise RuntimeError("server/hosted.py has the app with a lifespan")
        if scope["type"] == "websocket":
            as_exchange_scope(scope)
            send = refusing(send)
        exchange = Exchange(scope, send, self.state)
        scope["exchange"] = exchange
        self.state.open_exchanges.add(exchange)
        try:
            await self.serve(exchange, scope, receive)
        except ClientGone:
            exchange.status, exchange.reason = 499, exchange.reason or "disconnected"
        finally:
            self.state.open_exchanges.discard(exchange)
            if not self.state.open_exchanges:
                self.state.idle.set()
            self.note(exchange, scope)
            # Reference cycles would wait for the garbage collector, which stalls the loop.
            del scope["exchange"]
            scope.pop("extensions", None)

    async def serve(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        try:
            await self.app(scope, receive, exchange.send)
            return
        except ApiError as caught:
            error = caught
        except MediaError as caught:
            error = from_media(caught)
        except RenderError as caught:
            error = from_render(caught)
        except asyncio.CancelledError:
            if self.state.phase not in ("draining", "dead") or exchange.started:
                raise
            error = unavailable("draining", "the server is shutting down")
        except HTTPException as caught:  # starlette's router: wrong method
            error = from_router(caught, exchange)
        except ClientGone:
            raise
        except Exception as caught:
            error = internal(exchange.request_id)
            fault.error("request failed: id=%s route=%s", exchange.request_id, exchange.route, exc_info=caught)
        if exchange.started:  # a partly sent answer cannot be repaired; uvicorn closes the connection
            raise RuntimeError("answer cut short") from None
        await exchange.refuse(error.as_sent(scope.get("renamed", {})).with_traceback(None))

    def note(self, exchange: Exchange, scope: Scope) -> None:
        """Update the metrics and write one log line."""
        seconds = time.monotonic() - exchange.arrival
        self.state.metrics.http(exchange.method, exchange.status, exchange.route, seconds)
        if self.state.follows_requests:
            self.follow(exchange, exchange.arrival + seconds, header_of(scope, b"traceparent"))
        level = logging.DEBUG if exchange.route in PROBES else logging.INFO
        if self.state.config.server.disable_access_log or not log.isEnabledFor(level):
            return
        method = exchange.method if exchange.method in KNOWN_METHODS else "other"
        found: dict[str, object] = {"key": exchange.key_name, "reason": exchange.reason, **exchange.details}
        more = {name: value for name, value in found.items() if value != ""}
        fields: dict[str, object] = {"request_id": exchange.request_id, "method": method, "route": exchange.route}
        fields |= {"status": exchange.status, "ms": round(seconds * 1000, 1), **more}
        log.log(
            level,
            "%s %s %s %d %.1fms%s",
            exchange.request_id,
            method,
            exchange.route,
            exchange.status,
            seconds * 1000,
            "".join(f" {name}={value}" for name, value in more.items()),
            extra={"fields": fields},
        )

    def follow(self, exchange: Exchange, ended: float, traceparent: str) -> None:
        """Report the request's times to the timeline and to OpenTelemetry; `traceparent`: the client's span."""
        state = self.state
        if exchange.route in PROBES:
            return
        times = RequestTimes(
            exchange.request_id,
            exchange.method,
            exchange.route,
            exchange.status,
            exchange.reason,
            state.names[0],
            traceparent,
            exchange.arrival,
            exchange.first_token,
            ended,
            exchange.generation,
        )
        if state.trace is not None:
            state.trace.request(exchange.request_id, times.phases(), route=exchange.route, **exchange.details)
        if state.spans is not None:
            state.spans.add(times)


TEI_PATHS = frozenset({"/embed", "/embed_all", "/embed_sparse", "/predict", "/info"})
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/v1/health", "/ping", "/metrics", "/version"})
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


def from_router(error: HTTPException, exchange: Exchange) -> ApiError:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(
            405, "method_not_allowed", f"this path answers {allowed}", headers={"allow": allowed} if allowed else None
        )
    return not_found("there is no such path")
