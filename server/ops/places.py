"""Places: who may begin, by how many are open and by how long a newcomer would wait (SECURITY S42).

Owner: loop. In: a request of a kind of route, with its caller (a key's name or an address) and how many choices it
wants, before anything dear happens. Out: a Place that is held until the request has ended, or a 429. The expected wait
is what stands in front, divided by the rate at which the kind's choices have ended while others waited. Callers are
served in turn (_fast/turns), so what stands in front of a caller is its own line times the callers that wait, or all
that waits, if that is less. Retry-After is the time until the wait is short enough for all that were sent away before.

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

SPAN_S, MOST_SPAN_S = 10.0, 300.0  # seconds of waiting that a rate is measured over: at least, at most
ROW_S, TEXT_S = 1.0, 0.01  # that a row, or a thread, is taken for, as long as none has ended
MOST_RETRY_S = 60
MOST_CALLERS = 4096  # that are remembered as sent away
PART = 8  # a caller may take more while it has less than so many times what is free


class Line:
    """Choices of one kind: how many wait and run, and how fast they end. Owner: Places."""

    def __init__(self, usual_s: float) -> None:
        """`usual_s`: what a choice takes, as long as none has ended."""
        self._usual_s = usual_s
        self.waiting: Counter[str] = Counter()  # by caller
        self.weights: dict[str, int] = {}  # of those that wait
        self.total_waiting = 0
        self.running = 0
        self.busy = False  # a request waits for others to end
        self._at = 0.0  # of the last event
        self._ended = 0.0  # choices, and
        self._seconds = 0.0  # seconds of waiting, both of the last while
        self._runs_s = 0.0  # seconds from first step to end, of a request, and
        self._guess = 0.0  # choices that would end in a second if all rows ran such requests

    def tick(self, now: float) -> None:
        """Time passes up to an event."""
        if self.busy and now > self._at:
            span = max(SPAN_S, min(2.0 * self._runs_s, MOST_SPAN_S))
            left = math.exp((self._at - now) / span)
            self._ended *= left
            self._seconds = self._seconds * left + span * (1.0 - left)
        self._at = now

    def end(self, count: int, ran_s: float, rows: int) -> None:
        """Choices of a request that had begun have ended together."""
        if self.busy:
            self._ended += count
        guess = max(rows, count) / max(ran_s, 1e-4)
        self._runs_s += 0.1 * (ran_s - self._runs_s) if self._runs_s else ran_s
        self._guess += 0.1 * (guess - self._guess) if self._guess else guess

    def rate(self, rows: int) -> float:
        """Choices that end in a second while others wait. What one request took counts as far as that is not known."""
        guess = self._guess or rows / self._usual_s
        trust = 1.0 / (1.0 + self._seconds)
        return max((self._ended + guess * trust) / (self._seconds + trust), 1e-3)

    def share(self, caller: str, weight: int) -> float:
        """The part of the turns that a caller has while others wait."""
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
        self, limit: int, per_key: int = 0, tokens: int = 0, max_wait: float = 0.0, shared: bool = True
    ) -> None:
        """`max_wait`: seconds, 0: any; `shared`: no caller takes nearly all of the places."""
        self.limit = limit
        self.rows = self.threads = 1
        self.per_key = per_key  # 0: no limit
        self.max_tokens = tokens  # prompt tokens of all open choices
        self.max_wait = max_wait
        self.shared = shared
        self.taken = 0
        self.requests = 0
        self.tokens = 0
        self.lines: dict[Kind, Line] = {kind: Line(TEXT_S if kind == "texts" else ROW_S) for kind in KINDS}
        self._of: Counter[str] = Counter()  # choices by caller
        self._sent_away: dict[str, tuple[float, float]] = {}  # caller -> choices that will come again, at which time

    def size(self, limit: int, rows: int, threads: int) -> None:
        """What the engine and the pool have: places, rows that run at one time, threads that texts take."""
        self.limit, self.rows, self.threads = limit, rows, threads

    def hold(self, count: int, caller: str, kind: Kind = "answers", weight: int = 1) -> Place:
        """Places for all choices of a request while it lives (`with`). Raises the 429."""
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
        """More places, of those that are `spare`, for a request that has begun."""
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
        """Seconds until a choice of the caller would begin, by what waits now."""
        line = self.lines[kind]
        in_front = line.total_waiting - self._free(kind)
        if in_front <= 0:
            return 0.0
        line.tick(time.monotonic())
        if kind == "texts":  # the pool takes them as they come
            return in_front / line.rate(self.threads)
        by_turns = (line.waiting.get(caller, 0) + 1) / line.share(caller, weight)
        return min(float(in_front), by_turns) / line.rate(self.rows)

    def spare(self, caller: str) -> int:
        """How many more choices the caller may hold now."""
        left = self.limit - self.taken
        return max(0, min(left, self.per_key - self._of.get(caller, 0)) if self.per_key else left)

    def take_tokens(self, count: int) -> None:
        """Prompt tokens, once they are known; given back with `give_tokens`."""
        if self.max_tokens and self.tokens + count > self.max_tokens:
            raise queue_full(self.retry_after(), "too many prompt tokens run or wait; try again later")
        self.tokens += count

    def give_tokens(self, count: int) -> None:
        self.tokens -= count

    def retry_after(self, kind: Kind = "answers") -> int:
        """Seconds until one of those that run or wait is likely to end."""
        return self._whole_seconds(1.0 / self.lines[kind].rate(self._width(kind)))

    # -- what a Place reports

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
        """Choices of a place have had their first step."""
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
        if place.kind == "texts":  # these run as soon as a thread of the pool is free
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
        """Rows, or threads, that nothing has."""
        if kind == "texts":
            return self.threads
        return max(0, self.rows - sum(line.running for name, line in self.lines.items() if name != "texts"))

    def _retry(self, count: int, caller: str, kind: Kind, weight: int, seconds: float) -> int:
        """Retry-After of a request that is sent away: behind what was sent away before and has not come again."""
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
    """What one request holds of Places; left once. Owner: the handler's task, or what it hands the place to."""

    __slots__ = ("caller", "count", "kind", "places", "since", "waiting", "weight")

    def __init__(self, places: Places, count: int, caller: str, kind: Kind, weight: int, begun: bool = False) -> None:
        self.places = places
        self.count = count
        self.caller = caller
        self.kind: Kind = kind
        self.weight = weight
        self.waiting = 0 if begun else count  # choices without a first step
        self.since = time.monotonic()  # of the first step, once there is one

    def begin(self) -> None:
        """The first step of one more choice has run."""
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
