"""Access and quantity limits: API keys, throttle of wrong keys, body budget.

Owner: loop. Each limit is one object that every route passes (SECURITY ground rule 2). Keys are stored as SHA-256 and
compared in constant time with every stored one; a server that was given keys never answers without one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.types import Scope

from engine.base.errors import ConfigError
from server.errors import ApiError, queue_full, quoted

log = logging.getLogger("omniloop")

ADMIN = "admin"  # the name of the admin key
MAX_ADDRESSES = 4096
MOST_WEIGHT = 1000
USUAL_PART = 3.0  # a client may take more while it holds less than this multiple of the free amount


class ApiKeys:
    """The keys of clients, by name. Owner: loop; reread on SIGHUP.

    A client's stored responses, cached prefixes and counts belong to its key's name. The operator gives the name, or it
    is made of the key's digest. It never depends on the key's position in the file, which changes when a line is
    removed.
    """

    def __init__(self, keys: tuple[str, ...], path: str = "") -> None:
        self._flags = keys
        self._path = path
        self._digests: list[tuple[str, bytes]] = []
        self._weights: dict[str, int] = {}
        self.reload()

    def __bool__(self) -> bool:
        """Whether a key is needed: the operator gave a flag or file for keys, even if it holds none."""
        return bool(self._flags or self._path)

    def reload(self) -> None:
        """Read the file again. If this raises ConfigError, the keys do not change."""
        found = [KeyLine("", key, "--api-key") for key in self._flags]
        if self._path:
            found += keys_of(self._path)
        digests = named(found)
        weights = {hashlib.sha256(line.key.encode()).digest(): line.weight for line in found}
        self._digests, self._weights = digests, {name: weights[digest] for name, digest in digests}

    def weight(self, name: str) -> int:
        """The weight of a key's waiting requests, by the key's name."""
        return self._weights.get(name, 1)

    def knows(self, name: str) -> bool:
        """Whether a key of this name exists; if no key is needed, only callers without a name exist."""
        return any(name == known for known, _ in self._digests) if self else not name

    def match(self, presented: bytes) -> str | None:
        """The name of the key, or None. Compares with all stored keys, so that its time does not depend on the
        match.
        """
        digest = hashlib.sha256(presented).digest()
        found: str | None = None
        for name, stored in self._digests:
            if hmac.compare_digest(digest, stored):
                found = name
        return found


class KeyLine(NamedTuple):
    """A key as the operator wrote it; `name` may be empty."""

    name: str
    key: str
    where: str
    weight: int = 1  # share of the key among waiting requests


def named(lines: list[KeyLine]) -> list[tuple[str, bytes]]:
    """(name, digest) of each key. Raises ConfigError if two keys have one name, or one key has two."""
    names: dict[bytes, str] = {}
    places: dict[str, str] = {}
    for name, key, where, _ in sorted(lines, key=lambda line: not line.name):  # given names come first
        digest = hashlib.sha256(key.encode()).digest()
        if digest in names and (not name or name == names[digest]):
            continue
        name = name or digest_name(key)
        if name == ADMIN:
            raise ConfigError(f"{where}: the name {ADMIN} is that of --admin-api-key; give this key another")
        if digest in names:
            raise ConfigError(f"{where}: this key has the name {quoted(names[digest])} already; a key has one name")
        if name in places:
            raise ConfigError(f"{where}: {quoted(name)} names another key already ({places[name]}); a name has one key")
        names[digest] = name
        places[name] = where
    return [(name, digest) for digest, name in names.items()]


def digest_name(key: str) -> str:
    """The name of a key without a given name: 32 bits of a digest, which reveal nothing about a random key."""
    return f"key-{hashlib.sha256(b'omniloop key ' + key.encode()).hexdigest()[:8]}"


def keys_of(path: str) -> list[KeyLine]:
    """The lines of a key file. Raises ConfigError if the file is missing or a line has no key."""
    where = f"--api-key-file {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; name a file that this user may read") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text; write one key per line, or NAME:KEY") from None
    found: list[KeyLine] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        at = f"{where}: line {number}"
        line, weight = weighed(line, at)
        name, colon, key = map(str.strip, line.partition(":"))
        if colon and not key:
            raise ConfigError(f"{at} has a name and no key; write NAME:KEY")
        found.append(KeyLine(name, key, at, weight) if colon else KeyLine("", line, at, weight))
    if not found:
        raise ConfigError(f"{where}: holds no key; write one key per line, or NAME:KEY, or leave the flag out")
    return found


def weighed(line: str, where: str) -> tuple[str, int]:
    """A line of the key file without ` weight=N`, and this number."""
    key, space, word = line.rpartition(" ")
    if not space or not word.startswith("weight="):
        return line, 1
    text = word.removeprefix("weight=")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_WEIGHT:
        raise ConfigError(f"{where}: weight={quoted(text)}; a weight is a whole number from 1 to {MOST_WEIGHT}")
    return key.rstrip(), int(text)


def presented_key(scope: Scope) -> bytes | None:
    """The key that the client sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


class WrongKeys:
    """Counts refusals per address and minute, for a bounded number of addresses. Owner: loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()  # address -> (minute, count)

    def note(self, address: str) -> None:
        """Count a wrong or missing key. Raises the 429 once this address has too many refusals in this minute."""
        now = int(time.monotonic() // 60)
        minute, count = self._seen.pop(address, (now, 0))
        count = count + 1 if minute == now else 1
        self._seen[address] = (now, count)
        if len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)
        if count > self._limit:
            raise too_many_failures()


class Shares:
    """A bounded quantity that clients share: each may take more while it holds less than `weight` times the free
    amount.

    A single client gets weight / (weight + 1) of all. Many clients that take all they can leave room for a newcomer:
    the free part is 1 / (1 + weight x clients) of all, without knowing the clients beforehand. An infinite weight gives
    no shares. Owner: loop.
    """

    def __init__(self, limit: int, weight: float) -> None:
        self.limit = limit
        self.used = 0
        self._weight = weight
        self._of: dict[str, int] = {}  # amounts by key name or address

    def has_room(self, client: str, size: int) -> bool:
        """Whether a client may take `size` now."""
        free = self.limit - self.used
        return size <= free and self._of.get(client, 0) < self._weight * free

    def take(self, client: str, size: int) -> bool:
        """Take `size` if there is room; returns whether it was taken."""
        return self.has_room(client, size) and self.take_any(client, size)

    def take_any(self, client: str, size: int) -> bool:
        """Take `size` for a client that may take everything."""
        if self.used + size > self.limit:
            return False
        self.used += size
        if size:
            self._of[client] = self._of.get(client, 0) + size
        return True

    def give(self, client: str, size: int) -> None:
        self.used -= size
        left = self._of.get(client, 0) - size
        assert left >= 0, "what was taken"
        if left:
            self._of[client] = left
        else:
            self._of.pop(client, None)

    def held(self, client: str) -> int:
        return self._of.get(client, 0)


class BodyBudget(Shares):
    """Bytes of bodies held at one time: in total and by each client. Owner: loop."""

    def __init__(self, limit: int, weight: float = USUAL_PART) -> None:
        super().__init__(limit, weight)
        self.closed = False  # whether the server is short of memory

    def has_room(self, client: str, size: int) -> bool:
        return not self.closed and super().has_room(client, size)

    def require(self, client: str, size: int) -> None:
        """Take `size` bytes. Raises the 429 if there is no room."""
        if not self.take(client, size):
            raise self.full(client, size)

    def full(self, client: str, size: int) -> ApiError:
        if self.closed:
            return queue_full(5, "this server is short of memory and takes no large bodies; try again later")
        if self.limit - self.used < size:
            return queue_full(1, "too many bytes are being uploaded at this moment; try again later")
        text = (
            f"this client holds {self.held(client)} of the {self.limit} bytes that bodies may take together; wait for "
            "its other uploads to end"
        )
        return ApiError(429, "key_busy", text, headers={"retry-after": "1"})


class Sessions:
    """Open realtime sessions: in total and of each client. Owner: loop."""

    def __init__(self, limit: int, per_key: int = 0, weight: float = USUAL_PART) -> None:
        self.shares = Shares(limit, weight)
        self._per_key = per_key  # 0: no limit

    @contextmanager
    def hold(self, client: str) -> Iterator[None]:
        """Hold one session during the `with` block. Raises the 429 if there is no room."""
        shares = self.shares
        if self._per_key and shares.held(client) >= self._per_key:
            text = f"this client may have {self._per_key} realtime sessions open at one time; end one"
            raise ApiError(429, "key_busy", text, headers={"retry-after": "1"})
        if not shares.take(client, 1):
            held, text = shares.held(client), f"{shares.used} of {shares.limit} realtime sessions are open"
            raise queue_full(5, f"{text}, {held} of them this client's; end one, or try again later")
        try:
            yield
        finally:
            shares.give(client, 1)


def wrong_key() -> ApiError:
    """The error for a missing and for a wrong key."""
    return ApiError(
        401,
        "invalid_api_key",
        "a valid API key is needed: send Authorization: Bearer KEY or x-api-key: KEY",
        headers={"www-authenticate": "Bearer"},
    )


def too_many_failures() -> ApiError:
    return ApiError(
        429, "too_many_failures", "too many wrong API keys from this address", headers={"retry-after": "60"}
    )
