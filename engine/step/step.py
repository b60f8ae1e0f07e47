"""Step: one step in flight, from its launch until its tokens are committed, and what its rows bring home.

Owner: made by the device thread; the stream fills it; after its event has fired it is the device thread's again. A
field's comment says what sets the field.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from _fast.layout import TokenCode
from _fast.plan import StepPlan
from engine.base.errors import EngineError, InvalidLogitsError, TokenIdError
from engine.base.request import FinishReason, TokenLogprob
from engine.step.rows import RowArrays

Media = tuple[int, int, torch.Tensor]  # where an item's rows begin in the step, how many they are, and the rows


class Event(Protocol):
    """Fires when a step's tokens can be read."""

    fired_at: float  # time.perf_counter() seconds, 0 before
    found_done: bool  # it had fired before anything waited for it

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until it has fired; False after `timeout` seconds, where the device can be asked."""


@dataclass(slots=True)
class StepTimes:
    """Moments of time.perf_counter(), and seconds."""

    launched_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0  # the stream began the forward; by the backend
    began_before: bool = False  # started_at is late: the previous step was already done when polled; by the backend
    plan_at: float = 0.0  # when the step behind it should be planned; 0: as long as such steps take after it began
    gap_s: float = 0.0  # the device's time between the step before and this one's forward; 0: not measured

    def is_a_guess(self) -> None:
        """The step takes an unknown time: the step behind it is planned at once."""
        self.plan_at = self.launched_at


@dataclass(slots=True)
class Home:
    """What the rows of a step bring home, by plan row; filled when the event has fired."""

    num_rows: int
    width: int
    tokens: np.ndarray | None = None  # int32 [num_rows, width]: runs; -1 in rows without a valid sample
    invalid: dict[int, EngineError] = field(default_factory=dict)  # rows that end alone, with an error
    finishes: dict[int, FinishReason] = field(default_factory=dict)  # rows that a part ends
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)  # by the name of a part: what it adds to rows

    def take_tokens(self, sampled: np.ndarray, chosen: np.ndarray, num_embeddings: int) -> None:
        """The runs of the sampled rows, int [num_sampled, at most `width`].

        A run with INVALID or OUTSIDE in it ends its row, without a token or a log-probability.
        """
        bad = (chosen == TokenCode.INVALID) | (chosen == TokenCode.OUTSIDE)
        for place in np.flatnonzero(bad.any(1)).tolist() if bad.any() else ():
            is_outside = TokenCode.OUTSIDE in chosen[place]
            error = TokenIdError(num_embeddings) if is_outside else InvalidLogitsError()
            self.invalid.setdefault(int(sampled[place]), error)
        self.tokens = np.full((self.num_rows, self.width), -1, np.int32)
        self.tokens[sampled] = TokenCode.END
        self.tokens[sampled, : chosen.shape[1]] = chosen
        for row in self.invalid:
            self.drop(row)

    def cut(self, row: int, count: int) -> None:
        """The row's run ends behind `count` tokens."""
        if count == 0:
            self.drop(row)
        elif self.tokens is not None:
            self.tokens[row, count:] = TokenCode.END

    def drop(self, row: int) -> None:
        """The row brings no token."""
        if self.tokens is not None:
            self.tokens[row] = -1
        self.logprobs.pop(row, None)

    def extra(self, name: str, row: int, value: Any) -> None:
        """Adds to what the loop gets of a row in this step."""
        self.extras.setdefault(name, {})[row] = value


@dataclass(slots=True)
class Step:
    """What a launched step owns until it is committed."""

    plan: StepPlan
    rows: RowArrays
    event: Event
    run: Callable[..., None]  # run(call, *args) on the stream, behind what was launched; by the backend
    times: StepTimes = field(default_factory=StepTimes)
    parts: list[Any] = field(default_factory=list)  # StepParts with a row here, in their order; by the executor
    variant: int = 0  # of the graphs that run it, bits by part; by the executor
    waits: bool = False  # its choice waits for the step before; by the executor
    chosen: bool = False  # its choice has been launched; by the backend
    media: list[Media] = field(default_factory=list)  # by the media part
    eager: bool = False  # nothing recorded will do: a part wants tensors of its forward; by that part
    hidden: torch.Tensor | None = None  # [num_tokens, hidden_size] of eager steps; by the backend
    notes: dict[str, Any] = field(default_factory=dict)  # by the name of a part: what its hooks hand on
    home: Home = field(init=False)
    sampled_slots: np.ndarray = field(init=False)  # the slots of the rows that sample, by ascending row
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.home = Home(self.plan.num_rows, self.plan.width)
        self.sampled_slots = self.rows.slots[self.rows.sampled]

    @property
    def number(self) -> int:
        """Of its record, and of the lines in which its tokens come home."""
        return int(self.plan.number)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What a choice leaves on the device, at the addresses that graphs know."""

    tokens: torch.Tensor  # [rows] the first sampled rows' tokens; on an accelerator int32 [max_rows], by plan row
    hidden: torch.Tensor  # [rows, hidden_size] from which these were chosen
    rows: int  # sampled rows, with padding


Ending = Callable[[Chosen, int], None]  # StepPart.after_choice
