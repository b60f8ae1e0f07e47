"""Seats: open connections, counted in total and per address (SECURITY S11).

Owner: loop, one per server. In: the peer's address when a connection opens. Out: a Seat, released when the connection
ends, also as a WebSocket; or the 503. An address may take another seat while it holds less than eight times the number
of free seats, so one address that opens all it can leaves a ninth for others. If no seat is free, the longest idle
connection gives its seat to the new one. Peers in --trusted-proxies stand for many
clients, so only --max-connections bounds them.
"""

from __future__ import annotations

from collections.abc import Callable

from server.errors import ApiError
from server.ops.limits import Shares
from server.ops.proxies import TrustedProxies, home

WEIGHT = 8
MOST_REFUSED = 32  # refusals sent at one time; further connections are cut off, since each holds a descriptor


class Seat:
    """One open connection. Owner: the connection."""

    __slots__ = ("_seats", "address")

    def __init__(self, seats: Seats, address: str) -> None:
        self._seats: Seats | None = seats
        self.address = address

    def rest(self, close: Callable[[], None]) -> None:
        """The connection is idle; `close` ends it, if its seat is needed."""
        if self._seats is not None:
            self._seats.idle[self] = close

    def wake(self) -> None:
        """The connection is no longer idle."""
        if self._seats is not None:
            self._seats.idle.pop(self, None)

    def leave(self) -> None:
        """Release the seat; further calls do nothing."""
        self.wake()
        if self._seats is not None:
            self._seats.shares.give(self.address, 1)
            self._seats = None


class Seats:
    """The seats of a server. Owner: loop."""

    def __init__(self, limit: int, proxies: TrustedProxies, weight: float = WEIGHT, idle_s: int = 1) -> None:
        """`idle_s`: seconds that an idle connection stays open."""
        self.shares = Shares(limit, weight)
        self.idle: dict[Seat, Callable[[], None]] = {}  # longest idle first -> closes the connection
        self.keep_alive = (
            b"keep-alive",
            b"timeout=%d" % idle_s,
        )  # header, if the connection stays open
        self.refused = 0  # connections that stay open only to read their refusal
        self._proxies = proxies

    def take(self, client: tuple[str, int] | None) -> Seat:
        """Take a seat. Raises the 503 if there is no room."""
        shares = self.shares
        peer = self._proxies.peer(client)
        many = self._proxies.lists(peer)
        address = peer if many else home(peer)
        take = shares.take_any if many else shares.take
        if take(address, 1) or (self._make_room(address) and take(address, 1)):
            return Seat(self, address)
        if shares.used >= shares.limit:
            text = f"more than {shares.limit} connections are open (--max-connections)"
        else:
            text = (
                f"{shares.held(address)} of {shares.limit} connections are this address's; close some "
                "(--trusted-proxies names proxies in front of this server)"
            )
        raise ApiError(503, "too_many_connections", text, headers={"retry-after": "5"})

    def _make_room(self, address: str) -> bool:
        """Close the longest idle connection: any if all seats are taken, otherwise one of this address."""
        full = self.shares.used >= self.shares.limit
        seat = next((seat for seat in self.idle if full or seat.address == address), None)
        if seat is None:
            return False
        close = self.idle[seat]
        seat.leave()
        close()
        return True
