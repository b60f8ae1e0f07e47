"""The app: the layers between a connection and a handler.

Owner: loop. In: ASGI scopes of HTTP requests. Out: answers. server/routes/table.py has the paths and handlers;
server/start/lifespan.py loads and drains the model. `python -m server` puts the app on a socket
(server/start/process.py), server/hosted.py gives the app to another server.

    Exchanges -> Edge -> Gate -> root -> handler
"""

from __future__ import annotations

import difflib

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.dialects.table import routes_of
from server.errors import ApiError, not_found
from server.http.edge import Edge, Gate
from server.http.exchange import Exchanges
from server.ops.planted import faults_of, into_handlers
from server.routes import realtime
from server.routes.switched import switch_of
from server.state import AppState

LONGEST_PATH = 64  # characters of a path that are compared; no path of ours is longer


def make_app(state: AppState) -> ASGIApp:
    """The layers around the router: Exchanges -> Edge -> Gate -> Router."""
    routes = routes_of(state.config)
    plain = {(method, line.path): line.app for line in routes if "{" not in line.path for method in line.methods or ()}
    paths = [] if state.config.server.disable_docs else sorted({path for _, path in plain})

    async def unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
        raise no_such_path(scope["path"], paths)

    router = Router(routes, redirect_slashes=False, default=unknown_path)

    async def root(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await socket(scope, receive)
            return
        app = plain.get((scope["method"], scope["path"]))
        if app is not None:  # a fixed path: no need to try each route's pattern
            await app(scope, receive, send)
            return
        scope["app"] = router  # makes starlette raise an error for a wrong method instead of sending its own text
        await router(scope, receive, send)

    inner = into_handlers(root, lambda: faults_of(state)) if state.config.health.debug_faults else root
    app = Exchanges(Edge(Gate(inner, state), state), state)
    state.batches.app = Exchanges(Gate(inner, state), state)  # lines have no connection to check
    root_path = state.config.server.root_path
    return without_prefix(app, root_path) if root_path else app


def without_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """The app under a path prefix too, for a proxy that forwards the prefix; all checks see the path without it."""
    begin = f"{prefix}/"

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == prefix or path.startswith(begin):
            scope = {**scope, "path": path[len(prefix) :] or "/"}
        await app(scope, receive, send)

    return inner


async def socket(scope: Scope, receive: Receive) -> None:
    """Serve the only path that takes WebSockets."""
    if scope["path"] != realtime.PATH:
        raise not_found(f"there is no such path for WebSockets; {realtime.PATH} is one")
    await realtime.realtime(scope["exchange"], scope, receive)


def no_such_path(path: str, known: list[str]) -> ApiError:
    """The error for an unknown path; it names the flag that enables the path, or the most similar path."""
    if not known:
        return not_found("there is no such path")
    if flag := switch_of(path):
        return not_found(f"this server was started without {flag}, which enables this path")
    near = difflib.get_close_matches(path[:LONGEST_PATH], known, n=1, cutoff=0.8)
    return not_found(
        f"there is no such path; {f'did you mean {near[0]}?' if near else '/docs/api lists those that are'}"
    )
