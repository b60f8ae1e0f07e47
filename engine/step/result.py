"""StepResult: one step in flight, from launch to collect.

Owner: made by the device thread; the stream fills it; after its event has fired it is the device thread's again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from _fast.layout import TokenCode
from _fast.plan import StepPlan
from engine.base.errors import EngineError, InvalidLogitsError, TokenIdError
from engine.base.request import TokenLogprob
from engine.device.host import HostEvent
from engine.grammar.advance import GrammarRows, Lines
from engine.step.build import RowArrays


class Event(Protocol):
    """Fires when a step's tokens can be read."""

    fired_at: float  # time.perf_counter() seconds, 0 before

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until it has fired; False after `timeout` seconds, where the device can be asked."""


@dataclass(slots=True)
class StepResult:
    """What a launched step owns until it is collected."""

    plan: StepPlan
    rows: RowArrays
    event: Event = field(default_factory=HostEvent)
    launched_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0  # the stream began the forward
    began_before: bool = False  # started_at is late: the previous step was already done when polled
    plan_at: float = 0.0  # when the step behind it should be planned; 0: as long as such steps take after it began
    gap_s: float = 0.0  # the device's time between the step before and this one's forward; 0: not measured
    tokens: np.ndarray | None = None  # int32 [num_rows, width]: runs; -1 in rows without a valid sample
    invalid: dict[int, EngineError] = field(default_factory=dict)  # errors of plan rows that end alone
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by plan row
    pooled: dict[int, np.ndarray] = field(default_factory=dict)  # by plan row: float32 arrays that nobody writes again
    lines: Lines | None = None  # which tokens rows with grammars may choose
    redone: list[int] = field(default_factory=list)  # slots whose sample in the step behind this one is dropped
    stopped: list[int] = field(default_factory=list)  # plan rows that their grammar ends
    error: BaseException | None = None

    def consume(self, grammars: GrammarRows) -> None:
        """Hands the tokens of rows with grammars to these, and ends the rows that they end."""
        sampled = self.rows.sampled
        assert self.tokens is not None
        for place, end in grammars.consume(self.rows.slots[sampled], self.tokens[sampled, 0]).items():
            row = int(sampled[place])
            if end.error is not None:
                self.invalid[row] = end.error
            else:
                self.stopped.append(row)
                self.invalid.pop(row, None)
            if not end.keeps_token:
                self.tokens[row] = -1
                self.logprobs.pop(row, None)

    def take_tokens(self, chosen: np.ndarray, num_embeddings: int) -> None:
        """The runs of the sampled rows, int [num_sampled, at most the plan's width].

        A run that begins with INVALID or OUTSIDE ends its row, without a log-probability.
        """
        sampled, first = self.rows.sampled, chosen[:, 0]
        for place in np.flatnonzero((first == TokenCode.INVALID) | (first == TokenCode.OUTSIDE)).tolist():
            row = int(sampled[place])
            error = TokenIdError(num_embeddings) if first[place] == TokenCode.OUTSIDE else InvalidLogitsError()
            self.invalid.setdefault(row, error)
        self.tokens = np.full((self.plan.num_rows, self.plan.width), -1, np.int32)
        self.tokens[sampled] = TokenCode.END
        self.tokens[sampled, : chosen.shape[1]] = chosen
        for row in self.invalid:
            self.tokens[row] = -1
            self.logprobs.pop(row, None)
