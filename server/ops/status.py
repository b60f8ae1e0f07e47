"""One line in the log for every ten seconds in which the engine worked; off with --disable-log-stats.

Owner: loop. In: the totals that /metrics reads. Out: rates since the previous line. An idle server writes nothing; the
line after the last work shows that it has ended. Nothing is computed between two lines.

    running 12, waiting 0; 812 tokens/s, prompts 1,240 tokens/s; step 9.4 ms; KV cache 31.0 %, prefix cache hits 42.0 %
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from server.ops import expert_watch
from server.ops.metrics import Metrics

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger("omniloop.status")

INTERVAL_S = 10.0
OF_A_STEP = ("schedule", "launch", "wait", "commit")  # parts of a turn of the device thread


class Checked(Protocol):
    """The part of a Canary that the line reads."""

    answered: int  # each canary took a step


class Asked(Protocol):
    """The ExpertWatch, as the status line reads it."""

    def ask(self) -> None:
        """Fetch the experts' load of the next step."""


class Counted(Protocol):
    """The parts of AppState that the line reads."""

    engine: Engine
    metrics: Metrics

    @property
    def experts(self) -> Asked | None:
        """The watch of the experts' load; None: the model has no experts."""

    @property
    def canary(self) -> Checked | None:
        """The canary; None until the engine is ready."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start, at one time."""

    at: float
    steps: int
    generated: int
    prompts: int
    queries: int
    hits: int
    preemptions: int
    step_s: float

    @classmethod
    def of(cls, state: Counted) -> Totals:
        stats, histograms = state.engine.stats, state.metrics.histograms
        return cls(
            at=time.monotonic(),
            steps=stats.steps - (0 if state.canary is None else state.canary.answered),
            generated=stats.generation_tokens,
            prompts=stats.prompt_tokens,
            queries=stats.prefix_queries,
            hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            step_s=sum(histograms[f"step_{part}_seconds"].total for part in OF_A_STEP),
        )


class StatusLine:
    """Writes the line every INTERVAL_S, from the server's readiness to its end. Owner: loop."""

    def __init__(self, state: Counted) -> None:
        self._state = state
        self._before = Totals.of(state)
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.tick)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def tick(self) -> None:
        self.write()
        if self._state.experts is not None and expert_watch.log.isEnabledFor(logging.DEBUG):
            self._state.experts.ask()
        self.start()

    def write(self) -> None:
        """Write the line if there was work since the previous one."""
        before, now = self._before, Totals.of(self._state)
        self._before = now
        if now.steps > before.steps or self._state.engine.stats.waiting:
            log.info("%s", line(self._state, before, now))


def line(state: Counted, before: Totals, now: Totals) -> str:
    """The line for the time between two totals."""
    stats = state.engine.stats
    seconds = max(now.at - before.at, 1e-9)
    steps = now.steps - before.steps
    parts = [
        f"running {stats.running}, waiting {stats.waiting}",
        f"{(now.generated - before.generated) / seconds:,.0f} tokens/s, "
        f"prompts {(now.prompts - before.prompts) / seconds:,.0f} tokens/s",
    ]
    if steps:
        parts.append(f"step {1000 * (now.step_s - before.step_s) / steps:.1f} ms")
    cache = f"KV cache {100 * stats.kv_usage:.1f} %"
    if now.queries > before.queries:
        cache += f", prefix cache hits {100 * (now.hits - before.hits) / (now.queries - before.queries):.1f} %"
    parts.append(cache)
    if now.preemptions > before.preemptions:
        parts.append(f"{now.preemptions - before.preemptions} preempted")
    return "; ".join(parts)
