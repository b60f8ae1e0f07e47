"""StepPart: an optional capability of the step, in one file. This base class has hooks that do nothing.

The plain step (engine/step/plain) computes tokens and samples the next token. Every other feature of a request is a
part. In each step the executor calls the hooks of the parts that have a row in it, in the order of parts/order.py.
Hooks run on the device thread, except `before` and `after_choice`, which run on the stream.

    once       claim (before the KV cache is sized) -> start -> allocate -> warm_up -> layer_hook, after_choice recorded
    request    gate -> place -> admit ... -> leave -> reset
    step       role -> before -> (forward) -> between -> (choice) -> collect -> (commit) -> after
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from _fast.scheduler import Scheduler
from engine.base.errors import scope_of
from engine.base.output import StepOutput
from engine.base.request import Request
from engine.base.stats import StepStats
from engine.cache.spec import CacheSpec, LayerCache
from engine.layers.batch import LayerHook
from engine.step.backend.base import Backend
from engine.step.live import LiveRow, Place
from engine.step.step import Chosen, Step

log = logging.getLogger("omniloop.engine")

ABSENT, JOINS, WAITS = 0, 1, 2  # roles of a part in a step; WAITS: sampling waits until `between` has run

Ranks = Literal["first", "every"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources that a part needs, known before the KV cache is sized; `+` adds the claims of several parts."""

    token_bytes: int = 0  # bytes per token of the KV cache, freed and reused together with a full-attention block
    step_bytes: int = 0  # bytes of device memory for the part's own launches in the largest step
    weight_bytes: int = 0  # bytes of device memory that `start` takes for good: weights, texts of rows
    variants: int = 0  # additional variants of graphs, besides those of plain steps
    specs: tuple[CacheSpec, ...] = ()  # layers of the KV cache, appended to the model's layers

    def __add__(self, other: Claim) -> Claim:
        return Claim(
            self.token_bytes + other.token_bytes,
            max(self.step_bytes, other.step_bytes),  # parts launch one after the other, so they can share memory
            self.weight_bytes + other.weight_bytes,
            self.variants + other.variants,
            self.specs + other.specs,
        )


class Steps(Protocol):
    """The executor's interface for parts."""

    backend: Backend
    watched: np.ndarray  # int32 [max_slots, n]: tokens after which the GIL-free loop returns to Python; -1: none

    def mark(self, slot: int) -> None:
        """Reads the parts' `special` bits of a slot again; a part calls this when its bits have changed."""

    def behind(self, step: Step) -> Step | None:
        """The step that was launched after `step`, or None."""

    def wake(self) -> None:
        """Asks the device thread to check the gates of waiting requests again; any thread may call this."""


class StepPart:
    """The base class of parts. A part handles the rows that need it; steps without these rows have no extra cost."""

    name: ClassVar[str]  # key in extras of outputs, in Step.notes and in the ledger
    changes_forward: ClassVar[bool] = False  # graphs of forwards have the part's variant too, not only sampling
    rests: bool = False  # steps without drafts call `after_rest` in place of `after_choice`
    ranks: ClassVar[Ranks] = "first"  # the ranks that hold the part's state, if a model lies on several devices
    variant = 0  # the bit of the part's graph variant if it claims one; the executor sets it before `start`

    # -- once ---------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        """The part's claim; `check` calls this method without a loaded model. Raises ConfigError."""
        return Claim()

    def start(self, steps: Steps) -> None:
        """Allocates the part's memory outside the KV cache. The backend has its buffers and the model its weights."""

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """Runs after the KV cache is sized; `caches`: the caches of the layers that the part claimed."""

    def warm_up(self, walk: bool) -> None:
        """Launches every kernel of the part once at start, so that no request has to wait for a compilation.

        `walk`: launches are only collected for compilation; a second call runs them.
        """

    def layer_hook(self) -> LayerHook | None:
        """A hook that runs inside each forward, recorded forwards included; None: no hook."""
        return None

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        """On the stream: runs after sampling and verification and before the next forward, and is recorded in graphs;
        `variant`: the variant of the graph, 0 for plain steps. Steps without a graph call this method with their own
        variant."""

    def after_rest(self, chosen: Chosen, variant: int) -> None:
        """For a part with `rests`: like `after_choice`, after a step in which no row has or gets drafts, and each run
        is one token."""

    def line(self) -> str:
        """One line about the part for the log of a start and for `check`; "": none."""
        return ""

    # -- by request ---------------------------------------------------------------------------------------------------

    def gate(self, request: Request) -> bool:
        """Whether a request may enter the scheduler now. If not, the request waits, and `Steps.wake` repeats the
        check."""
        return True

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        """Completes the request's Place for the scheduler. An exception refuses the request."""

    def displace(self, place: Place, scheduler: Scheduler) -> None:
        """Undoes `place` after the request was refused."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        """Stages a slot that no step in flight contains; may change the slot's words, int32 [SLOT_WORDS] (floats as
        bits). Returns True if the part has to see steps with this slot.
        """
        return False

    def leave(self, slot: int, row: LiveRow, length: int) -> Any:
        """Runs before the next plan, when the slot of a traced row was freed; `length`: its computed tokens. Returns an
        extra that is sent to the loop separately, or None."""

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot whose `admit` returned True; `poison` writes values that make later use fail visibly."""

    def free(self, scheduler: Scheduler) -> None:
        """Runs after the scheduler has freed slots or media entries; their rows have already left."""

    def special(self, slot: int) -> int:
        """Bits for _fast/steady: which of the slot's steps need Python, and from VARIANT_SHIFT on the graph variant of
        the slot's other steps."""
        return 0

    # -- by step ------------------------------------------------------------------------------------------------------

    def role(self, step: Step) -> int:
        """ABSENT, JOINS or WAITS; called while at least one slot is live whose `admit` returned True."""
        return ABSENT

    def before(self, step: Step) -> None:
        """On the stream: runs before the inputs of the forward are complete."""

    def between(self, step: Step) -> None:
        """Runs after the forward of `step` was launched and the previous step was settled, before sampling."""

    def collect(self, step: Step) -> None:
        """Runs when the step's tokens are on the host but not committed; may end rows or drop tokens (Step.home)."""

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """Runs after the commit of the step; `places`: the index of each plan row in the lists of the output."""

    # -- statistics ---------------------------------------------------------------------------------------------------

    def gauges(self, stats: StepStats) -> None:
        """Adds the part's numbers to the stats of a settled step."""

    def ledger(self) -> dict[str, int]:
        """Counts of resources that requests hold; zero when idle."""
        return {}


def forget(call: Callable[..., None], *args: Any) -> None:
    """Calls a function that clears state of an ended request. Logs an error, unless the device is lost: the next
    admission writes the same state again."""
    try:
        call(*args)
    except Exception as error:
        if scope_of(error) == "device":
            raise
        log.exception("the rest of a request could not be dropped")
