"""Fetcher: media from http, https and file URLs (SECURITY S13-S16).

Owner: loop; files are read in the pool. In: a URL as the client wrote it. Out: its bytes, or MediaError. Each host name
is resolved once, all of its addresses must be allowed, and the connection goes to a checked address. The fetcher
follows redirects itself and checks each new URL. Errors disclose nothing about the network or the disk.

    decide | turn (all, per host) | look up, check | dial, check | status, length, encoding | bytes, counted | next hop?
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from engine.base.request import Modality
from mm.allow import AllowList, LocalFile, Target, as_address, decide, follow
from mm.errors import MediaError, busy, fetch_failed, not_allowed, too_large
from mm.limits import MediaLimits

if TYPE_CHECKING:
    import ssl

    import aiohttp
    from aiohttp.abc import ResolveResult

Lookup = Callable[[str, int], Awaitable[list[str]]]  # (name, port) -> addresses
Dial = Callable[[int, int, int], socket.socket]  # (family, type, protocol) -> an unconnected socket
Receive = Callable[[int, int], None]  # (bytes, HTTP status of the refusal)

_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "omniloop", "Accept": "*/*", "Accept-Encoding": "identity"}


class _BlockedError(OSError):
    """An address to which no connection is allowed."""


class Fetcher:
    """One per server. Only `lookup` and `dial` touch the network; tests replace both."""

    def __init__(
        self,
        limits: MediaLimits,
        pool: concurrent.futures.Executor,
        *,
        lookup: Lookup | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.open = 0  # fetches in progress
        self._limits = limits
        self._pool = pool
        self._allowed = AllowList(limits.allowed_media_domains)
        self._names = concurrent.futures.ThreadPoolExecutor(limits.media_max_fetches, "names")
        self._lookup = lookup or self._system_lookup
        self._dial = dial or socket.socket
        self._session: aiohttp.ClientSession | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(limits.media_max_fetches)
        self._hosts: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    def check(self, url: str) -> None:
        """Check a URL (S13) before any I/O; raises MediaError 403."""
        decide(url, self._limits, self._allowed)

    async def fetch(self, url: str, modality: Modality, receive: Receive) -> bytes:
        """Fetch the bytes of `url`; `receive` counts them for the request as they arrive."""
        target = decide(url, self._limits, self._allowed)
        self.open += 1
        try:
            if isinstance(target, LocalFile):
                data = await asyncio.wrap_future(self._pool.submit(self._read_file, target, modality))
                receive(len(data), 400)
                return data
            return await self._walk(target, modality, receive)
        finally:
            self.open -= 1

    async def close(self) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _walk(self, target: Target, modality: Modality, receive: Receive) -> bytes:
        """Follow redirects within the time limit of this kind of media."""
        queued = True
        try:
            async with asyncio.timeout(self._limits.fetch_timeout(modality)):
                session = await self._started()
                for _ in range(self._limits.media_max_redirects + 1):
                    queued = True
                    async with self._turn(target.host):
                        queued = False
                        answer = await self._get(session, target, modality, receive)
                    if isinstance(answer, bytes):
                        return answer
                    target = answer
        except TimeoutError:
            if queued:
                raise busy("too many media URLs are being fetched; try again shortly") from None
        except Exception as error:
            if not _is_network_error(error):
                raise
        raise fetch_failed()

    async def _get(
        self, session: aiohttp.ClientSession, target: Target, modality: Modality, receive: Receive
    ) -> bytes | Target:
        """Send one request. Returns the body, or the target of a redirect."""
        from yarl import URL

        url = URL.build(
            scheme=target.scheme,
            host=f"[{target.host}]" if ":" in target.host else target.host,
            port=target.port,
            path=target.path,
            query_string=target.query,
            encoded=True,
        )
        async with session.get(url, allow_redirects=False) as response:
            self._check_peer(response)
            if response.status in _REDIRECTS:
                return self._redirected(target, response.headers.get("Location", ""))
            encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
            if response.status != 200 or encoding != "identity":
                raise fetch_failed()
            return await self._body(response, modality, receive)

    async def _body(self, response: aiohttp.ClientResponse, modality: Modality, receive: Receive) -> bytes:
        most = self._limits.max_bytes(modality)
        too_much = too_large(f"the {modality} behind the URL is too large; at most {most} bytes are fetched", 422)
        if (response.content_length or 0) > most:
            raise too_much
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK):
            if len(body) + len(chunk) > most:
                raise too_much
            receive(len(chunk), 422)
            body += chunk
        if not body:
            raise fetch_failed()
        return bytes(body)

    def _redirected(self, target: Target, location: str) -> Target:
        """Check a redirect's URL like the first URL (S13); the error for a blocked URL is the one for every failure."""
        if not location:
            raise fetch_failed()
        try:
            following = decide(follow(target, location), self._limits, self._allowed)
        except MediaError:
            raise fetch_failed() from None
        if isinstance(following, LocalFile) or (target.scheme == "https" and following.scheme != "https"):
            raise fetch_failed()
        return following

    def _check_peer(self, response: aiohttp.ClientResponse) -> None:
        transport = response.connection.transport if response.connection is not None else None
        peer = transport.get_extra_info("peername") if transport is not None else None
        if peer and not self._allowed.dials(as_address(peer[0].partition("%")[0])):
            raise fetch_failed()

    @contextlib.asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        """Wait until fewer than the allowed fetches run, in all and from this host."""
        turns, users = self._hosts.setdefault(host, (asyncio.Semaphore(self._limits.media_max_fetches_per_host), []))
        users.append(None)
        try:
            async with turns, self._turns:
                yield
        finally:
            users.pop()
            if not users:
                self._hosts.pop(host, None)

    async def _started(self) -> aiohttp.ClientSession:
        """Import and build the HTTP client at the first fetch, off the loop: most servers never need it."""
        async with self._starting:
            if self._session is None:
                context = await asyncio.wrap_future(self._pool.submit(_client_parts))
                self._session = self._build(context)
            return self._session

    def _build(self, context: ssl.SSLContext) -> aiohttp.ClientSession:
        import aiohttp

        connector = aiohttp.TCPConnector(
            resolver=_resolver(self._addresses),
            use_dns_cache=False,
            force_close=True,
            limit=0,  # no limit here: `_turn` bounds the connections
            ssl=context,
            socket_factory=self._socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        )

    async def _addresses(self, host: str, port: int) -> list[ResolveResult]:
        """Resolve a name once; if one of its addresses is forbidden, all are."""
        async with asyncio.timeout(self._limits.media_dns_timeout):
            found = await self._lookup(host, port)
        addresses = [as_address(text) for text in dict.fromkeys(found)]
        if not addresses or not all(self._allowed.dials(address) for address in addresses):
            raise _BlockedError
        return [
            {
                "hostname": host,
                "host": str(address),
                "port": port,
                "family": socket.AF_INET if address.version == 4 else socket.AF_INET6,
                "proto": socket.IPPROTO_TCP,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def _system_lookup(self, host: str, port: int) -> list[str]:
        """Resolve in our own threads: uvloop resolves two names at a time, so slow names would delay all others."""
        look = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._names, look)
        return [str(entry[4][0]) for entry in found]

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Check each address again just before its socket is made, so a forbidden address never gets a socket."""
        family, kind, protocol, _, where = info
        if not self._allowed.dials(as_address(where[0])):
            raise _BlockedError
        return self._dial(family, kind, protocol)

    def _read_file(self, file: LocalFile, modality: Modality) -> bytes:
        """Read a file (S16): below the allowed folder, no symbolic links; a regular file within the size limit
        (pool).
        """
        root = self._limits.allowed_local_media_path
        assert root is not None
        try:
            descriptor = _open_beneath(root, file.parts)
        except OSError:
            raise not_allowed() from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise not_allowed()
            most = self._limits.max_bytes(modality)
            if facts.st_size > most:
                raise too_large(f"the file has {facts.st_size} bytes; at most {most} are allowed")
            with open(descriptor, "rb", closefd=False) as opened:
                return opened.read(most)
        finally:
            os.close(descriptor)


def _open_beneath(root: str, parts: tuple[bytes, ...]) -> int:
    """Open root/parts component by component, without following symbolic links; returns a descriptor."""
    base = tuple(part for part in os.path.realpath(root).encode().split(b"/") if part)
    if base != parts[: len(base)] or len(parts) <= len(base):
        raise FileNotFoundError
    folder = os.open(os.path.realpath(root), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[len(base) : -1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: opening a pipe must not wait for its writer
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)


def _client_parts() -> ssl.SSLContext:
    """Import the client and read the certificates (pool): this takes a tenth of a second, too long for the loop."""
    import ssl

    import aiohttp  # noqa: F401

    return ssl.create_default_context()


def _is_network_error(error: Exception) -> bool:
    """Whether sockets, the HTTP client or its URL class raise this error because of the other side or its address."""
    import aiohttp

    return isinstance(error, OSError | ValueError | aiohttp.ClientError)


def _resolver(addresses: Callable[[str, int], Awaitable[list[ResolveResult]]]) -> Any:
    """An aiohttp resolver that uses our own look-up."""
    from aiohttp.abc import AbstractResolver

    class CheckedResolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return await addresses(host, port)

        async def close(self) -> None:
            pass

    return CheckedResolver()
