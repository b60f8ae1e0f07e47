"""Places: admits requests by the number of open choices and by a new request's expected wait (SECURITY S42).

Owner: loop. In: a request of a kind of route, its caller (a key's name or an address) and its number of choices, before
any expensive work. Out: a Place that is held until the request has ended, or a 429. The expected wait is the number of
choices that come first, divided by the rate at which choices of this kind have ended while others waited. Callers are
served in turn (_fast/turns), so the choices that come first are the caller's own waiting choices times the number of
waiting callers, or all waiting choices if these are fewer. Retry-After is the time until the wait is short enough for
all requests that were refused before.

    hold -- waits -- begin -- runs -- leave          rate: ends per second of the time in which a request waits
"""

from __future__ import annotations

import math
import time
from collections import Counter
from types import TracebackType
from typing import Literal, Self

from server.errors import ApiError, queue_full

Kind = Literal["answers", "inputs", "speech", "texts"]
KINDS: tuple[Kind, ...] = ("answers", "inputs", "speech", "texts")

SPAN_S, MOST_SPAN_S = 10.0, 300.0  # a rate is measured over this many seconds of waiting, least and most
ROW_S, TEXT_S = 1.0, 0.01  # assumed seconds of a choice (or text) until the first has ended
MOST_RETRY_S = 60
MOST_CALLERS = 4096  # callers whose refusals are remembered
PART = 8  # a caller may take more while it holds less than this multiple of the free places


class Line:
    """Choices of one kind: how many wait and run, and how fast they end. Owner: Places."""

    def __init__(self, usual_s: float) -> None:
        """`usual_s`: assumed seconds of a choice until the first has ended."""
        self._usual_s = usual_s
        self.waiting: Counter[str] = Counter()  # choices by caller
        self.weights: dict[str, int] = {}  # weights of waiting callers
        self.total_waiting = 0
        self.running = 0
        self.busy = False  # whether a request waits for others to end
        self._at = 0.0  # time of the last event
        self._ended = 0.0  # choices that ended while others waited, decaying
        self._seconds = 0.0  # seconds in which requests waited, decaying
        self._runs_s = 0.0  # mean seconds of a request from first step to end
        self._guess = 0.0  # choices per second if all rows ran such requests

    def tick(self, now: float) -> None:
        """Update the decaying sums to the time of an event."""
        if self.busy and now > self._at:
            span = max(SPAN_S, min(2.0 * self._runs_s, MOST_SPAN_S))
            left = math.exp((self._at - now) / span)
            self._ended *= left
            self._seconds = self._seconds * left + span * (1.0 - left)
        self._at = now

    def end(self, count: int, ran_s: float, rows: int) -> None:
        """Count `count` choices of one started request that have ended together."""
        if self.busy:
            self._ended += count
        guess = max(rows, count) / max(ran_s, 1e-4)
        self._runs_s += 0.1 * (ran_s - self._runs_s) if self._runs_s else ran_s
        self._guess += 0.1 * (guess - self._guess) if self._guess else guess

    def rate(self, rows: int) -> float:
        """Choices that end per second while others wait. Before this is measured, the duration of single
        requests counts.
        """
        guess = self._guess or rows / self._usual_s
        trust = 1.0 / (1.0 + self._seconds)
        return max((self._ended + guess * trust) / (self._seconds + trust), 1e-3)

    def share(self, caller: str, weight: int) -> float:
        """The fraction of turns that a caller has while others wait."""
        return weight / (sum(self.weights.values()) + (0 if caller in self.weights else weight))

    def enter(self, caller: str, weight: int, count: int) -> None:
        self.waiting[caller] += count
        self.weights[caller] = weight
        self.total_waiting += count

    def leave(self, caller: str, count: int) -> None:
        self.total_waiting -= count
        self.waiting[caller] -= count
        if self.waiting[caller] <= 0:
            del self.waiting[caller], self.weights[caller]


class Places:
    """Choices that are being prepared, wait or run. Owner: loop."""

    def __init__(
        self,
        limit: int,
        per_key: int = 0,
        tokens: int = 0,
        max_wait: float = 0.0,
        shared: bool = True,
        idle: bool = False,
    ) -> None:
        """`max_wait`: seconds, 0: no limit; `shared`: no caller may take nearly all of the places; `idle`: of lines of
        batches, which have no deadlines of their own.
        """
        self.limit = limit
        self.rows = self.threads = 1
        self.per_key = per_key  # most choices per caller; 0: no limit
        self.max_tokens = tokens  # most prompt tokens of all open choices
        self.max_wait = max_wait
        self.shared = shared
        self.idle = idle
        self.taken = 0
        self.requests = 0
        self.tokens = 0
        self.lines: dict[Kind, Line] = {kind: Line(TEXT_S if kind == "texts" else ROW_S) for kind in KINDS}
        self._of: Counter[str] = Counter()  # choices by caller
        self._sent_away: dict[str, tuple[float, float]] = {}  # caller -> (refused choices that will return, time)

    def size(self, limit: int, rows: int, threads: int) -> None:
        """Set the engine's number of places and rows, and the pool's number of threads for texts."""
        self.limit, self.rows, self.threads = limit, rows, threads

    def hold(self, count: int, caller: str, kind: Kind = "answers", weight: int = 1) -> Place:
        """Places for all choices of a request, for a `with` block. Raises the 429."""
        self._check_count(count, caller, kind, weight)
        wait = self.expected_wait(caller, kind, weight)
        if 0.0 < self.max_wait < wait:
            retry = self._retry(count, caller, kind, weight, wait - self.max_wait)
            raise queue_full(
                retry,
                f"a request would wait about {wait:.0f} s here and this server lets it wait {self.max_wait:g} s "
                f"(--max-queue-wait); try again in {retry} s",
            )
        return Place(self, count, caller, kind, weight)

    def hold_more(self, count: int, caller: str, kind: Kind) -> Place:
        """More places, out of `spare`, for a request that has begun."""
        return Place(self, count, caller, kind, 1, begun=True)

    def _check_count(self, count: int, caller: str, kind: Kind, weight: int) -> None:
        own, free = self._of[caller], self.limit - self.taken
        if self.per_key and own + count > self.per_key:
            raise key_busy(self.per_key)
        if count > free:
            raise queue_full(
                self._retry(count, caller, kind, weight, 0.0),
                f"{self.taken} choices run or wait and {count} more were asked for; this server holds {self.limit}",
            )
        if self.shared and own >= PART * free:
            raise queue_full(
                self._retry(count, caller, kind, weight, 0.0),
                f"{own} choices of this client run or wait, and {free} of {self.limit} places are left for all others",
            )

    def expected_wait(self, caller: str, kind: Kind = "answers", weight: int = 1) -> float:
        """Seconds until a choice of the caller would begin, from the choices that wait now."""
        line = self.lines[kind]
        in_front = line.total_waiting - self._free(kind)
        if in_front <= 0:
            return 0.0
        line.tick(time.monotonic())
        if kind == "texts":  # the pool takes texts in order of arrival
            return in_front / line.rate(self.threads)
        by_turns = (line.waiting.get(caller, 0) + 1) / line.share(caller, weight)
        return min(float(in_front), by_turns) / line.rate(self.rows)

    def spare(self, caller: str) -> int:
        """How many more choices the caller may hold now."""
        left = self.limit - self.taken
        return max(0, min(left, self.per_key - self._of.get(caller, 0)) if self.per_key else left)

    def take_tokens(self, count: int) -> None:
        """Take a prompt's tokens from the budget; `give_tokens` returns them."""
        if self.max_tokens and self.tokens + count > self.max_tokens:
            raise queue_full(self.retry_after(), "too many prompt tokens run or wait; try again later")
        self.tokens += count

    def give_tokens(self, count: int) -> None:
        self.tokens -= count

    def retry_after(self, kind: Kind = "answers") -> int:
        """Seconds until one of the choices that run or wait will probably end."""
        return self._whole_seconds(1.0 / self.lines[kind].rate(self._width(kind)))

    # -- called by a Place

    def enter(self, place: Place) -> None:
        line = self.lines[place.kind]
        self.taken += place.count
        self.requests += 1
        self._of[place.caller] += place.count
        if place.waiting:
            line.enter(place.caller, place.weight, place.waiting)
        else:
            line.running += place.count
        self._note(place.kind)

    def begin(self, place: Place, count: int) -> None:
        """Count choices of a place that have had their first step."""
        line = self.lines[place.kind]
        line.leave(place.caller, count)
        line.running += count
        self._note(place.kind)

    def leave(self, place: Place) -> None:
        line, begun, now = self.lines[place.kind], place.count - place.waiting, time.monotonic()
        line.tick(now)
        self.taken -= place.count
        self.requests -= 1
        self._of[place.caller] -= place.count
        if self._of[place.caller] <= 0:
            del self._of[place.caller]
        if place.kind == "texts":  # texts run as soon as a thread of the pool is free
            line.end(place.count, now - place.since, self.threads)
        elif begun:
            line.end(begun, now - place.since, self.rows)
        if place.waiting:
            line.leave(place.caller, place.waiting)
        line.running -= begun
        self._note(place.kind)

    def _note(self, kind: Kind) -> None:
        line = self.lines[kind]
        line.tick(time.monotonic())
        line.busy = line.total_waiting > self._free(kind)

    def _width(self, kind: Kind) -> int:
        return self.threads if kind == "texts" else self.rows

    def _free(self, kind: Kind) -> int:
        """Number of free rows, or the pool's threads for texts."""
        if kind == "texts":
            return self.threads
        return max(0, self.rows - sum(line.running for name, line in self.lines.items() if name != "texts"))

    def _retry(self, count: int, caller: str, kind: Kind, weight: int, seconds: float) -> int:
        """Retry-After of a refused request: after the requests that were refused before and have not returned."""
        line, now = self.lines[kind], time.monotonic()
        rate = line.rate(self._width(kind)) * line.share(caller, weight)
        pending, since = self._sent_away.pop(caller, (0.0, now))
        pending = max(0.0, pending - (now - since) * rate) + count
        self._sent_away[caller] = pending, now
        if len(self._sent_away) > MOST_CALLERS:
            del self._sent_away[next(iter(self._sent_away))]
        return self._whole_seconds(seconds + pending / rate)

    @staticmethod
    def _whole_seconds(seconds: float) -> int:
        return max(1, min(MOST_RETRY_S, math.ceil(seconds)))


class Place:
    """One request's part of Places; left once. Owner: the handler's task, or the task to which it passes the place."""

    __slots__ = ("caller", "count", "kind", "places", "since", "waiting", "weight")

    def __init__(self, places: Places, count: int, caller: str, kind: Kind, weight: int, begun: bool = False) -> None:
        self.places = places
        self.count = count
        self.caller = caller
        self.kind: Kind = kind
        self.weight = weight
        self.waiting = 0 if begun else count  # choices without a first step
        self.since = time.monotonic()  # time of the first step, once there is one

    def begin(self) -> None:
        """Note the first step of one more choice."""
        if self.waiting:
            if self.waiting == self.count:
                self.since = time.monotonic()
            self.waiting -= 1
            self.places.begin(self, 1)

    def __enter__(self) -> Self:
        self.places.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.places.leave(self)
        self.waiting = 0


def key_busy(limit: int) -> ApiError:
    text = f"this key may have {limit} choices open at one time; wait for some to end"
    return ApiError(429, "key_busy", text, headers={"retry-after": "1"})
