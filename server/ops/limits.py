"""Who may ask, and how much at a time: API keys, wrong-key throttle, body budget.

Owner: loop. Each limit is one object that every route passes (SECURITY ground rule 2). Keys are kept as SHA-256 and
compared in constant time with every stored one; a server that was given keys never answers without one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import OrderedDict

from starlette.types import Scope

from engine.base.errors import ConfigError
from server.errors import ApiError, queue_full

log = logging.getLogger("omniloop")

MAX_ADDRESSES = 4096


class ApiKeys:
    """The keys clients may use, by name. Owner: loop; reread on SIGHUP."""

    def __init__(self, keys: tuple[str, ...], path: str = "") -> None:
        self._flags = keys
        self._path = path
        self._digests: list[tuple[str, bytes]] = []
        self._weights: dict[str, int] = {}
        self.reload()

    def __bool__(self) -> bool:
        """Whether a key is needed: what the operator asked for, however many keys there are."""
        return bool(self._flags or self._path)

    def reload(self) -> None:
        """Reads the file again. Raises ConfigError, and then the keys stay as they were."""
        found = [(f"key{at}", key) for at, key in enumerate(self._flags)]
        if self._path:
            found += keys_of(self._path)
        self._digests = [(name, hashlib.sha256(key.encode()).digest()) for name, key in found]

    def weight(self, name: str) -> int:
        """The share of a key in what waits, by its name."""
        return self._weights.get(name, 1)

    def match(self, presented: bytes) -> str | None:
        """The name of the key, or None; meets every stored key whatever the first ones said."""
        digest = hashlib.sha256(presented).digest()
        found: str | None = None
        for name, stored in self._digests:
            if hmac.compare_digest(digest, stored):
                found = name
        return found


def keys_of(path: str) -> list[tuple[str, str]]:
    """(name, key) of each line of a key file. Raises ConfigError where there is none, or a line without its key."""
    where = f"--api-key-file {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; name a file that this user may read") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text; write one key per line, or NAME:KEY") from None
    found: list[tuple[str, str]] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, key = map(str.strip, line.partition(":"))
        if colon and not key:
            raise ConfigError(f"{where}: line {number} has a name and no key; write NAME:KEY")
        found.append((name, key) if colon else (f"file{len(found)}", line))
    if not found:
        raise ConfigError(f"{where}: holds no key; write one key per line, or NAME:KEY, or leave the flag out")
    return found


def presented_key(scope: Scope) -> bytes | None:
    """What the client sent as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


class WrongKeys:
    """Counts refusals per address and minute; bounded. Right keys never get here. Owner: loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()  # address -> (minute, count)

    def note(self, address: str) -> None:
        """A wrong or missing key. Raises the 429 once this address has had its refusals of this minute."""
        now = int(time.monotonic() // 60)
        minute, count = self._seen.pop(address, (now, 0))
        count = count + 1 if minute == now else 1
        self._seen[address] = (now, count)
        if len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)
        if count > self._limit:
            raise too_many_failures()


class BodyBudget:
    """Bytes of bodies held at one time, in all. Owner: loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise queue_full(1, "too many bytes are being uploaded at this moment; try again later")
        self.used += size

    def give(self, size: int) -> None:
        self.used -= size


def wrong_key() -> ApiError:
    """One text for a missing and a wrong key."""
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
