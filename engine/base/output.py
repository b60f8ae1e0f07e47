"""StepOutput: one step's news on its way from the device thread to the loop.

Owner: made by the device thread, or read out of the ring that the GIL-free steps write; then the loop's. In: what a
commit settled. Out: parallel lists over the step's rows, which Engine routes to their streams.
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


@dataclass(slots=True)
class StepOutput:
    """One step's news for the loop: parallel lists over its rows. A row without token and finish has none."""

    stats: StepStats
    ids: list[int] = field(default_factory=list)  # the engine's number of each choice; it may have ended before
    tokens: list[int] = field(default_factory=list)  # -1: none
    finishes: list[int] = field(default_factory=list)  # FinishReason
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place in the lists
    firsts: dict[int, First] = field(default_factory=dict)  # by place, of choices of which the loop knows nothing yet
    invalid: dict[int, EngineError] = field(default_factory=dict)  # places whose choice ends alone -> its error
    error: EngineError | None = None  # of every row that ends with ERROR, when the step failed
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)  # by name, by place: what parts of the step add
    start: int = 0  # how far the loop has delivered

    def has_news(self, place: int) -> bool:
        """There is a token, or an end."""
        return self.tokens[place] >= 0 or self.finishes[place] != FinishReason.NONE

    def next_extra(self) -> int:
        """The next place, from `start` on, with an extra; behind all places where there is none."""
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
    """An entry of the ring (OutputRing.pop): an output made in Python, or the columns of a step without the GIL."""
    if isinstance(entry, StepOutput):
        return entry
    numbers, ids, tokens, finishes, logprob_lines = entry
    logprobs = {place: TokenLogprob(*line) for place, line in logprob_lines.items()} if logprob_lines else {}
    return StepOutput(StepStats.of(numbers, blocks_total), ids, tokens, finishes, logprobs)


def columns(plan: StepPlan) -> tuple[list[int], list[int], list[int], Sequence[int]]:
    """A committed plan's news: the requests' numbers, tokens and finishes, and by row the place where its run begins.

    A row has an entry for each token of its run, of which the last has the finish; a row without a token has one.
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
