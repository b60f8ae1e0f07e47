"""TrustedProxies: the client's address behind proxies (SECURITY S1, S2).

Owner: none, a value made from --trusted-proxies. In: an ASGI scope. Out: an address as text. X-Forwarded-For counts
only if the peer is on the operator's list. It is read from its end, past other listed proxies. The first address that
is no listed proxy is the client's; the client may have invented everything before it.

    X-Forwarded-For: invented by the client, client, proxy A     peer: proxy B     -> client, where A and B are listed
"""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

SOCKET = "unix"  # in the list: all peers of the Unix socket; as an address: such a peer, which has no address
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The peers whose X-Forwarded-For is trusted."""

    def __init__(self, listed: tuple[str, ...]) -> None:
        """Raises ValueError with the entry that is neither an address, nor a network, nor `unix`."""
        self._networks = []
        self._socket = SOCKET in listed
        for entry in listed:
            if entry == SOCKET:
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                raise ValueError(entry) from None

    def peer(self, client: tuple[str, int] | None) -> str:
        """The address of a connection's other end."""
        return str((client or (SOCKET,))[0])

    def lists(self, peer: str) -> bool:
        """Whether a peer is a listed proxy, which forwards other clients' requests."""
        return bool(self._networks or self._socket) and self._trusts(peer)

    def client_of(self, scope: Scope) -> str:
        """The client's address, for counting failures."""
        found = self.peer(scope.get("client"))
        if not self._networks and not self._socket:
            return found
        hops = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
        for hop in reversed(hops.split(b",")):
            if not self._trusts(found):
                break
            address = read(hop.decode("latin1"))
            if address is None:
                break
            found = str(address)
        return found

    def _trusts(self, text: str) -> bool:
        if text == SOCKET:
            return self._socket
        address = read(text)
        return address is not None and any(address in network for network in self._networks)


def home(address: str) -> str:
    """The address or network that counts as one client: for IPv6 the /64 network, since one host has a whole
    network.
    """
    found = read(address) if ":" in address else None
    if not isinstance(found, ipaddress.IPv6Address):
        return address
    return str(ipaddress.ip_network((found, 64), strict=False))


def read(text: str) -> Address | None:
    """An address in a form that proxies write: bare, with a port, or in brackets; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
