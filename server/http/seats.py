"""Seats: open connections, counted in total and per address (SECURITY S11).

Owner: loop, one per server. In: the peer's address when a connection opens. Out: a Seat, released when the connection
ends, also as a WebSocket; or the 503. An address may take another seat while it holds less than eight times the number
of free seats, so one address that opens all it can leaves a ninth for others. Peers in --trusted-proxies stand for many
clients, so only --max-connections bounds them.
"""

from __future__ import annotations

from server.errors import ApiError
from server.ops.limits import Shares
from server.ops.proxies import TrustedProxies, home

WEIGHT = 8
MOST_REFUSED = 32  # refusals sent at one time; further connections are cut off, since each holds a descriptor


class Seat:
    """One open connection. Owner: the connection."""

    __slots__ = ("_address", "_shares")

    def __init__(self, shares: Shares, address: str) -> None:
        self._shares = shares
        self._address = address

    def leave(self) -> None:
        """Release the seat; call once."""
        self._shares.give(self._address, 1)


class Seats:
    """The seats of a server. Owner: loop."""

    def __init__(self, limit: int, proxies: TrustedProxies, weight: float = WEIGHT) -> None:
        self.shares = Shares(limit, weight)
        self.refused = 0  # connections that stay open only to read their refusal
        self._proxies = proxies

    def take(self, client: tuple[str, int] | None) -> Seat:
        """Take a seat. Raises the 503 if there is no room."""
        shares = self.shares
        peer = self._proxies.peer(client)
        many = self._proxies.lists(peer)
        address = peer if many else home(peer)
        taken = shares.take_any(address, 1) if many else shares.take(address, 1)
        if taken:
            return Seat(shares, address)
        if shares.used >= shares.limit:
            text = f"more than {shares.limit} connections are open (--max-connections)"
        else:
            text = (
                f"{shares.held(address)} of {shares.limit} connections are this address's; close some "
                "(--trusted-proxies names proxies in front of this server)"
            )
        raise ApiError(503, "too_many_connections", text, headers={"retry-after": "5"})
