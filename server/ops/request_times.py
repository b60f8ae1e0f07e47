"""RequestTimes: one request's times and counts, for the timeline (engine/base/trace) and for spans (server/ops/otel).

Owner: loop. Made when an exchange ends, if a timeline or spans are on. Times are seconds of time.monotonic, which is
time.perf_counter's clock on Linux.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generation:
    """A request's parameters and results; one per exchange that reached the engine."""

    submitted: float
    queued_s: float  # from its arrival to its first step; below 0: no step
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reasons: tuple[str, ...]
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """An exchange that has ended; a time of 0 means that the event did not happen."""

    request_id: str
    method: str
    route: str
    status: int
    reason: str  # reason of its refusal
    model: str
    traceparent: str  # the client's span, in W3C's format
    arrival: float
    first_token: float
    ended: float
    generation: Generation | None

    def phases(self) -> Sequence[tuple[str, float, float]]:
        """Its consecutive phases: (name, begin, end)."""
        done = self.generation
        if done is None:
            return [("answer", self.arrival, self.ended)]
        found = [("prepare", self.arrival, done.submitted)]
        begun = max(done.submitted, self.arrival + done.queued_s) if done.queued_s >= 0 else self.ended
        found.append(("wait for the first step", done.submitted, begun))
        if done.queued_s >= 0:
            first = self.first_token or self.ended
            found += [("prefill", begun, first), ("decode", first, self.ended)]
        return found
