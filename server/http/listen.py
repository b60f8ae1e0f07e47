"""Binds the listening socket, and makes the uvicorn server on it.

Owner: loop. The socket is bound before anything is loaded, so a wrong address fails at once and early clients get an
answer (503) instead of a refused connection. start/process.py handles signals; uvicorn's own handling is off.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import stat
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from server.flags.config import Config
from server.http.protocol import with_limits
from server.http.seats import WEIGHT, Seats
from server.http.turnstile import Turnstile
from server.http.websocket import MAX_MESSAGE, sockets
from server.ops.descriptors import room_for
from server.ops.proxies import TrustedProxies

BACKLOG = 2048
ADVICE = {
    errno.EADDRINUSE: "end the process that listens there, or set another --port (0 picks a free one) or --uds",
    errno.EACCES: "ports below 1024 need privileges, and a socket's folder must be writable; set another --port, --uds",
    errno.EADDRNOTAVAIL: "--host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0",
}
OTHER_ADVICE = "set another --host, --port or --uds"


class BindError(Exception):
    """The server cannot listen on the address; the text is the one line that the operator reads."""


class Listener(uvicorn.Server):
    """uvicorn without signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_now(self) -> None:
        """End serve() without waiting for connections."""
        self.should_exit = True
        self.force_exit = True


def bind(config: Config) -> socket.socket:
    """The listening socket. Raises BindError."""
    server = config.server
    try:
        if server.uds:
            return bind_unix(server.uds)
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((server.host, server.port))
            listener.listen(BACKLOG)  # connections wait here until the loop runs
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError) as error:
        where = server.uds or f"{server.host}:{server.port}"
        text = f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}"
        raise BindError(f"{text}; {ADVICE.get(getattr(error, 'errno', 0), OTHER_ADVICE)}") from None


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket; replaces the socket of a killed server. Raises OSError if a process listens on it."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            if is_listening(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o660)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def is_listening(path: str) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


def address(config: Config, listener: socket.socket) -> tuple[str, int]:
    """(the address in `Listening on`, the port)."""
    if config.server.uds:
        return f"unix:{config.server.uds}", 0
    port = listener.getsockname()[1]
    scheme = "https" if config.server.ssl_certfile else "http"
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"{scheme}://{host}:{port}", port


def make_listener(config: Config, app: ASGIApp) -> Listener:
    server, limits = config.server, config.limits
    turnstile = Turnstile()
    part = math.inf if limits.trust_clients else WEIGHT
    proxies = TrustedProxies(server.trusted_proxies)
    idle_s = max(1, int(limits.keepalive_timeout))
    seats = Seats(room_for(limits.max_connections), proxies, part, idle_s)
    settings = uvicorn.Config(
        app,
        loop="none",
        http=with_limits(limits, turnstile, seats),
        ws=sockets(limits, turnstile),  # type: ignore[arg-type]
        ws_max_size=MAX_MESSAGE,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=idle_s,
        timeout_graceful_shutdown=2,
        ssl_keyfile=server.ssl_keyfile or None,
        ssl_certfile=server.ssl_certfile or None,
    )
    try:
        settings.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise BindError(f"--ssl-certfile {server.ssl_certfile}, --ssl-keyfile: cannot be used ({error})") from None
    return Listener(settings)
