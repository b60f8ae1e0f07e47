"""Step: one step in flight, from its launch until its tokens are committed, and the results of its rows (Home).

Owner: the device thread makes the step, the stream fills it, and after its event has fired it belongs to the device
thread again. The comment of a field names the code that sets the field.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from _fast.layout import TokenCode
from _fast.plan import StepPlan
from engine.base.errors import EngineError, InvalidLogitsError, TokenIdError
from engine.base.request import FinishReason, TokenLogprob
from engine.kernels.step_tensors import SlotTensors
from engine.step.rows import RowArrays

Media = tuple[int, int, torch.Tensor]  # (first token in the step, number of rows, rows [length, hidden])


class Event(Protocol):
    """Fires when a step's tokens can be read."""

    fired_at: float  # time.perf_counter() seconds, 0 before
    found_done: bool  # True: the event had already fired when the thread began to wait

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL until the event has fired; False after `timeout` seconds."""


@dataclass(slots=True)
class StepTimes:
    """Times of a step: values of time.perf_counter(), and durations in seconds."""

    launched_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0  # start of the forward on the stream; set by the backend
    began_before: bool = False  # started_at is late: the previous step was already done when polled; by the backend
    plan_at: float = 0.0  # when to plan the next step; 0: Pace predicts the time from the start of this step
    gap_s: float = 0.0  # the device's idle time between the previous step and this forward; 0: not measured

    def is_a_guess(self) -> None:
        """Marks the step's duration as unknown, so that the next step is planned at once."""
        self.plan_at = self.launched_at


@dataclass(slots=True)
class Home:
    """The results of a step on the host, by plan row; filled after the event has fired."""

    num_rows: int
    width: int
    tokens: np.ndarray | None = None  # int32 [num_rows, width]: runs; -1 in rows without a valid sample
    invalid: dict[int, EngineError] = field(default_factory=dict)  # rows that end with an error; other rows go on
    finishes: dict[int, FinishReason] = field(default_factory=dict)  # rows that a part ends
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place in `tokens`, flattened
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)  # by name of a part, by row: additional results

    def take_tokens(self, sampled: np.ndarray, chosen: np.ndarray, num_embeddings: int) -> None:
        """Stores the sampled rows' runs of tokens; `chosen`: int [num_sampled, at most `width`].

        A run that contains INVALID or OUTSIDE ends its row without a token or a log-probability.
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
        """Cuts the row's run of tokens to `count` tokens."""
        if count == 0:
            self.drop(row)
        elif self.tokens is not None:
            self.tokens[row, count:] = TokenCode.END

    def drop(self, row: int) -> None:
        """Drops the row's tokens and log-probabilities."""
        if self.tokens is not None:
            self.tokens[row] = -1
        for place in range(row * self.width, (row + 1) * self.width) if self.logprobs else ():
            self.logprobs.pop(place, None)

    def extra(self, name: str, row: int, value: Any) -> None:
        """Adds a value to the row's output of this step."""
        self.extras.setdefault(name, {})[row] = value


@dataclass(slots=True)
class Step:
    """A launched step and its data until it is committed."""

    plan: StepPlan
    rows: RowArrays
    event: Event
    run: Callable[..., None]  # run(call, *args): runs call on the stream after launched work; by the backend
    times: StepTimes = field(default_factory=StepTimes)
    parts: list[Any] = field(default_factory=list)  # StepParts with a row in the step, in order; by the executor
    variant: int = 0  # variant of the step's graphs, one bit per part; by the executor
    waits: bool = False  # sampling waits until the previous step is settled; by the executor
    chosen: bool = False  # sampling was launched; by the backend
    media: list[Media] = field(default_factory=list)  # set by the media part
    eager: bool = False  # the step cannot use graphs, because a part reads tensors of the forward; by that part
    hidden: torch.Tensor | None = None  # [num_tokens, hidden_size] of eager steps; by the backend
    notes: dict[str, Any] = field(default_factory=dict)  # by name of a part: data that its hooks pass on
    home: Home = field(init=False)
    sampled_slots: np.ndarray = field(init=False)  # the slots of the rows that sample, by ascending row
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.home = Home(self.plan.num_rows, self.plan.width)
        self.sampled_slots = self.rows.slots[self.rows.sampled]

    @property
    def number(self) -> int:
        """The number of the plan's record, and of the ring's line with the step's tokens."""
        return int(self.plan.number)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The results of sampling on the device, at the fixed addresses that graphs use."""

    runs: torch.Tensor  # int32 [rows, width]: a run per sampled row; on an accelerator [max_rows, width], by plan row
    slots: torch.Tensor  # int32 [rows]: the slot of each run; on an accelerator [max_rows], by plan row
    hidden: torch.Tensor  # [lines, hidden_size] hidden states from which the tokens were sampled
    state: SlotTensors  # the state of live requests; on a host only the words that the device writes, and drafts
    # int32 [lines] each: place of a line's token in the flattened runs, negative for padding; its slot; its number in
    # the answer. Without drafts a row has one line.
    lines: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


Ending = Callable[[Chosen, int], None]  # StepPart.after_choice


@dataclass(frozen=True, slots=True)
class Endings:
    """Functions that run after each choice of tokens."""

    drafting: Sequence[Ending] = ()  # of a step with drafts, and of every step if no part rests
    resting: Sequence[Ending] = ()  # of a step without drafts in which parts rest


NO_ENDINGS = Endings()
