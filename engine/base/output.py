"""StepOutput: one step's results on their way from the device thread to the loop.

Owner: made by the device thread, or read from the ring that the GIL-free steps write; then owned by the loop. In: the
tokens and ends of a committed step. Out: parallel lists over the step's rows, which Engine routes to streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from _fast.plan import StepPlan
from engine.base.errors import EngineError
from engine.base.request import FinishReason, TokenLogprob
from engine.base.stats import StepStats

First = tuple[
    int, float
]  # prompt tokens found in the prefix cache; seconds from the request's arrival to its first step
Drafted = tuple[int, int, int]  # the engine's number of a choice; drafts that a step verified for it; right drafts


@dataclass(slots=True)
class StepOutput:
    """One step's results for the loop: parallel lists over its rows. A row without token and finish has no news."""

    stats: StepStats
    ids: list[int] = field(default_factory=list)  # the engine's number of each choice; it may have ended already
    tokens: list[int] = field(default_factory=list)  # -1: none
    finishes: list[int] = field(default_factory=list)  # FinishReason
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # keyed by place in the lists
    firsts: dict[int, First] = field(default_factory=dict)  # by place, for choices in their first output
    invalid: dict[int, EngineError] = field(default_factory=dict)  # place -> error, for choices that fail alone
    error: EngineError | None = None  # the error of every row that ends with ERROR, if the step failed
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)  # name -> place -> value that a step part added
    drafted: Sequence[Drafted] = ()  # rows that verified drafts
    start: int = 0  # the loop has delivered the places before `start`

    def has_news(self, place: int) -> bool:
        """Whether the place has a token or an end."""
        return self.tokens[place] >= 0 or self.finishes[place] != FinishReason.NONE

    def next_extra(self) -> int:
        """The next place, from `start` on, with an extra; the number of places if there is none."""
        if not self.extras:
            return len(self.ids)
        places = (place for values in self.extras.values() for place in values if place >= self.start)
        return min(places, default=len(self.ids))

    def add(self, device_id: int, token: int, finish: int) -> int:
        """Appends a row; returns its place."""
        self.ids.append(device_id)
        self.tokens.append(token)
        self.finishes.append(finish)
        return len(self.ids) - 1


def from_ring(entry: Any, blocks_total: int) -> StepOutput:
    """The StepOutput of a ring entry (OutputRing.pop): made in Python, or built from the columns of a GIL-free step."""
    if isinstance(entry, StepOutput):
        return entry
    numbers, ids, tokens, finishes, logprob_lines, counts, drafted = entry
    logprobs = {place: TokenLogprob(*line) for place, line in logprob_lines.items()} if logprob_lines else {}
    stats = StepStats.of(numbers, blocks_total, counts)
    return StepOutput(stats, ids, tokens, finishes, logprobs, drafted=drafted)


def columns(plan: StepPlan) -> tuple[list[int], list[int], list[int], Sequence[int]]:
    """A committed plan's results: request numbers, tokens and finishes, and by row the place where its run begins.

    A row has an entry for each token of its run; the last entry has the finish. A row without a token has one entry.
    """
    arrays = (plan.out_request, plan.out_token, plan.out_finish)
    requests, tokens, ends = (np.asarray(array) for array in arrays)
    if plan.width == 1:
        rows = slice(plan.num_rows)
        return requests[rows].tolist(), tokens[rows].tolist(), ends[rows].tolist(), range(plan.num_rows)
    counts = np.maximum(np.asarray(plan.out_count)[: plan.num_rows], 1).astype(np.int64)
    places = counts.cumsum() - counts
    row = np.repeat(np.arange(plan.num_rows), counts)
    found = tokens[row * plan.width + np.arange(len(row)) - places[row]]
    finishes = np.zeros(len(row), np.int32)
    finishes[places + counts - 1] = ends[: plan.num_rows]
    return requests[row].tolist(), found.tolist(), finishes.tolist(), places.tolist()


def drafted_of(plan: StepPlan) -> list[Drafted]:
    """The rows of a committed plan that verified drafts."""
    counts = np.asarray(plan.out_drafted)[: plan.num_rows]
    rows = np.flatnonzero(counts)
    found = np.asarray(plan.out_request)[rows], counts[rows], np.asarray(plan.out_accepted)[rows]
    return list(zip(*(column.tolist() for column in found)))
