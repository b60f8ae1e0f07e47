"""Decide which URLs may be fetched and which addresses may be dialled (SECURITY S13, S14, S16).

Pure functions and frozen values, any thread, no I/O. In: the client's URL and the operator's list. Out: a Target, split
into parts so that no second parser can read the URL differently; or MediaError 403. Addresses are judged by our own
tables of special ranges, because Python's tables change between versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote, unquote_to_bytes

from mm.errors import MediaError, not_allowed
from mm.limits import MediaLimits

Address = IPv4Address | IPv6Address

# IANA's special-purpose registry, plus multicast, reserved and broadcast space; each line has its own test.
DENIED_IPV4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; metadata of some clouds
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # the host agent of a cloud, at a public address
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast relays
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
# IANA allocates only 2000::/3 of IPv6 as public unicast; the table lists its special parts. Ranges that embed an IPv4
# address (::a.b.c.d, ::ffff:0:0/96, 64:ff9b::/96, 64:ff9b:1::/48) lie outside 2000::/3, or in this table (2001::/32,
# 2002::/16).
PUBLIC_IPV6 = IPv6Network("2000::/3")
DENIED_IPV6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks, relays
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3ffe::/16",  # former test network
        "3fff::/20",  # documentation
    )
)

NO_SCHEME = "a media URL begins with https:// or http://, or with data:<type>;base64, in front of base64"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_IPV4 = re.compile(r"(?:0|[1-9][0-9]{0,2})(?:\.(?:0|[1-9][0-9]{0,2})){3}")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Characters that stay unescaped in the request target; every other character is percent-encoded as UTF-8.
_SAFE = "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~"


@dataclass(frozen=True, slots=True)
class Target:
    """One http or https resource, split into the parts of a request."""

    scheme: str
    host: str  # lower-case ASCII name, or an address without brackets
    port: int
    path: str  # begins with a slash, percent-encoded
    query: str
    address: Address | None  # set when the host is an IP address


@dataclass(frozen=True, slots=True)
class LocalFile:
    """The path of a file URL below the allowed folder, as components."""

    parts: tuple[bytes, ...]


def is_public(address: Address) -> bool:
    """Whether this is an address of the public unicast Internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in DENIED_IPV4)
    return address in PUBLIC_IPV6 and not any(address in network for network in DENIED_IPV6)


class AllowList:
    """The operator's `allowed_media_domains`: names, `*.name`, addresses, networks. Empty or `*` allows any public
    host.
    """

    def __init__(self, entries: tuple[str, ...]) -> None:
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        self._networks: list[IPv4Network | IPv6Network] = []
        self.any_host = not entries
        for entry in entries:
            text = entry.strip().lower().rstrip(".")
            if text == "*":
                self.any_host = True
            elif text.startswith("*."):
                self._suffixes.append(text[1:])
            else:
                try:
                    self._networks.append(ip_network(text.strip("[]"), strict=False))
                except ValueError:
                    self._names.add(_host_name(text, entry))

    def lists(self, target: Target) -> bool:
        """Whether an entry of the list names this host."""
        if target.address is not None:
            return self._within(target.address)
        return target.host in self._names or any(target.host.endswith(suffix) for suffix in self._suffixes)

    def dials(self, address: Address) -> bool:
        """Whether a connection to this address is allowed: the address is public, or the operator listed it."""
        return is_public(address) or self._within(address)

    def _within(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def decide(url: str, limits: MediaLimits, allowed: AllowList) -> Target | LocalFile:
    """S13: parse the URL once. Raises MediaError 403 unless scheme, host, port and form are all allowed."""
    match = _SCHEME.match(url)
    if match is None:
        raise MediaError(403, "media_url_not_allowed", NO_SCHEME)
    if len(url) > limits.media_max_url_bytes:
        raise not_allowed()
    scheme, rest = match.group(1).lower(), url[match.end() :]
    if any(character <= " " or character in "\\\x7f" for character in url) or not rest.startswith("//"):
        raise not_allowed()
    if scheme == "file":
        if limits.allowed_local_media_path is None:
            raise not_allowed()
        return _local_file(rest[2:])
    if scheme not in _DEFAULT_PORTS or scheme not in limits.media_schemes:
        raise not_allowed()
    target = _target(scheme, rest[2:])
    listed = allowed.lists(target)
    if not (listed or allowed.any_host):
        raise not_allowed()
    if target.port not in limits.media_ports and not listed:
        raise not_allowed()
    if target.address is not None and not allowed.dials(target.address):
        raise not_allowed()
    return target


def follow(target: Target, location: str) -> str:
    """The URL that a redirect from `target` points to; `decide` must still check this URL."""
    if _SCHEME.match(location):
        return location
    if location.startswith("//"):
        return f"{target.scheme}:{location}"
    host = f"[{target.host}]" if ":" in target.host else target.host
    origin = f"{target.scheme}://{host}:{target.port}"
    if location.startswith("/"):
        return origin + location
    if location.startswith("?"):
        return origin + target.path + location
    return origin + target.path[: target.path.rindex("/") + 1] + location


def _target(scheme: str, rest: str) -> Target:
    end = next((index for index, character in enumerate(rest) if character in "/?#"), len(rest))
    authority, tail = rest[:end], rest[end:].partition("#")[0]
    host, port = _split_port(authority)
    path, _, query = tail.partition("?")
    address = _address(host)
    return Target(
        scheme,
        str(address) if address is not None else _host_name(host),
        _DEFAULT_PORTS[scheme] if port is None else port,
        quote(path or "/", safe=_SAFE),
        quote(query, safe=_SAFE),
        address,
    )


def _split_port(authority: str) -> tuple[str, int | None]:
    """Host and port. URLs with a user part or a malformed port are refused."""
    if "@" in authority or "%" in authority:
        raise not_allowed()
    if authority.startswith("["):
        host, bracket, port = authority.partition("]")
        host += bracket
        if not bracket or (port and not port.startswith(":")):
            raise not_allowed()
        port = port[1:]
    else:
        host, _, port = authority.partition(":")
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise not_allowed()
    return host, int(port) if port else None


def _address(host: str) -> Address | None:
    """The address if `host` is an IP address in its canonical form, None for a name. Other forms of a number are
    refused.
    """
    if host.startswith("["):
        try:
            return IPv6Address(host[1:-1])
        except ValueError:
            raise not_allowed() from None
    host = _ascii(host)
    if _IPV4.fullmatch(host):
        try:
            return IPv4Address(host)
        except ValueError:
            raise not_allowed() from None
    last = host.rstrip(".").rpartition(".")[2]
    if _NUMBER.fullmatch(last):
        raise not_allowed()  # for example 127.1, 0x7f000001, 2130706433
    return None


def _host_name(host: str, entry: str | None = None) -> str:
    """The host name to look up. `entry` is the operator's line, which an error quotes; None for a client's URL."""
    name = _ascii(host)
    name = name[:-1] if name.endswith(".") else name
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        if entry is not None:
            raise ValueError(f"allowed_media_domains has {entry!r}; use a name, *.name, an address, a CIDR or *")
        raise not_allowed()
    return name


def _ascii(host: str) -> str:
    if host.isascii():
        return host.lower()
    import idna

    try:
        return idna.encode(host, uts46=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        raise not_allowed() from None


def _local_file(rest: str) -> LocalFile:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or "?" in path or "#" in path:
        raise not_allowed()
    parts = tuple(unquote_to_bytes(part) for part in path.split("/"))
    if any(part in (b"", b".", b"..") or b"/" in part or b"\0" in part for part in parts):
        raise not_allowed()
    return LocalFile(parts)


def as_address(text: str) -> Address:
    """Parse an address that the resolver or a socket returned; ValueError if the text is no address."""
    return ip_address(text)
