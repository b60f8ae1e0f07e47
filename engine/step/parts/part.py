"""StepPart: a capability of the step in one file; the base whose hooks do nothing.

The plain step (engine/step/plain) computes tokens and chooses the next one. All else that a request may ask for is a
part: the executor calls the hooks of those parts that have a row in a step, in the order of engine/step/parts. Hooks
run on the device thread, but for `before`, which runs where the forward is launched: on the stream.

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

ABSENT, JOINS, WAITS = 0, 1, 2  # roles of a part in a step; WAITS: the choice waits until `between` has run

Ranks = Literal["first", "every"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a part takes before the KV cache is sized; `+` adds claims of several parts."""

    token_bytes: int = 0  # per token of the cache, in blocks of full attention: freed and found again with the block
    step_bytes: int = 0  # of device memory, by launches of its own in the largest step
    weight_bytes: int = 0  # of device memory, by weights that `start` loads
    variants: int = 0  # kinds of steps for which graphs are recorded, plain steps not counted
    specs: tuple[CacheSpec, ...] = ()  # layers of the KV cache behind the model's

    def __add__(self, other: Claim) -> Claim:
        return Claim(
            self.token_bytes + other.token_bytes,
            max(self.step_bytes, other.step_bytes),  # launches of parts follow each other
            self.weight_bytes + other.weight_bytes,
            self.variants + other.variants,
            self.specs + other.specs,
        )


class Steps(Protocol):
    """The executor, as parts see it."""

    backend: Backend
    watched: np.ndarray  # int32 [max_slots, n]: tokens of a slot behind which the GIL-free loop asks Python; -1: none

    def mark(self, slot: int) -> None:
        """What a part says of a slot's steps (`special`) has changed."""

    def behind(self, step: Step) -> Step | None:
        """The step that was launched behind this one, if any."""

    def wake(self) -> None:
        """Asks the device thread for another look at requests that wait at a gate; from any thread."""


class StepPart:
    """The base of every part: rows of a step that ask for something take part in it, others cost it nothing."""

    name: ClassVar[str]  # in extras of outputs, in Step.notes, in the ledger
    ranks: ClassVar[Ranks] = "first"  # whose device holds the part's state, where a model lies on several
    variant = 0  # the bit of the part's graphs, where it claims some; set by the executor before `start`

    # -- once ---------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim:
        """What it takes; also asked where nothing is loaded (`check`). Raises ConfigError."""
        return Claim()

    def start(self, steps: Steps) -> None:
        """The backend has its buffers, the model its weights; what is allocated here is not the KV cache's."""

    def allocate(self, num_blocks: int, caches: Sequence[LayerCache]) -> None:
        """The cache is sized; `caches`: of the layers that the part claimed."""

    def warm_up(self, walk: bool) -> None:
        """Launches every kernel of the part once, at start, before any request: later none is compiled or met first.

        `walk`: launches are noted to be compiled, and do not run; a second call runs them.
        """

    def layer_hook(self) -> LayerHook | None:
        """What is called inside each forward, recorded ones too."""
        return None

    def after_choice(self, chosen: Chosen, variant: int) -> None:
        """On the stream, behind a choice and before the next forward, in what graphs record; `variant`: of the graph,
        0 for plain steps. The part of a step that is not recorded asks for the same."""

    # -- by request ---------------------------------------------------------------------------------------------------

    def gate(self, request: Request) -> bool:
        """Whether a request may enter the scheduler now; else it waits outside, and `Steps.wake` has it asked again."""
        return True

    def place(self, request: Request, place: Place, scheduler: Scheduler) -> None:
        """Completes how the scheduler knows the request. What raises refuses the request."""

    def displace(self, place: Place, scheduler: Scheduler) -> None:
        """The request was refused after `place`: what that took is given back."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> bool:
        """Stages a slot that no step in flight knows; may change its words int32 [SLOT_WORDS], floats as their bits.

        True: rows of the slot may take part.
        """
        return False

    def leave(self, slot: int, row: LiveRow, length: int) -> Any:
        """Before the next plan: a traced row's slot has come back, `length` tokens are computed. What is returned is
        an extra that reaches the loop by itself; None: nothing."""

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot that was admitted with True; with `poison` its numbers become ones that show at once."""

    def free(self, scheduler: Scheduler) -> None:
        """Slots or entries of media came back from the scheduler; their rows have left."""

    def special(self, slot: int) -> int:
        """Bits of _fast/steady: which steps of the slot the GIL-free loop leaves to Python, and above VARIANT_SHIFT the
        variant of the graphs that run the others."""
        return 0

    # -- by step ------------------------------------------------------------------------------------------------------

    def role(self, step: Step) -> int:
        """ABSENT, JOINS or WAITS; asked while any slot was admitted with True."""
        return ABSENT

    def before(self, step: Step) -> None:
        """On the stream, before the inputs of the forward are complete."""

    def between(self, step: Step) -> None:
        """The step before has been settled, the forward of this one is launched, its choice is not."""

    def collect(self, step: Step) -> None:
        """The step's tokens are on the host, and not committed: rows may be ended or lose their token (Step.home)."""

    def after(self, step: Step, output: StepOutput, places: Sequence[int], scheduler: Scheduler) -> None:
        """The step is committed; `places`: of each plan row in the lists of the output."""

    # -- what others ask ----------------------------------------------------------------------------------------------

    def gauges(self, stats: StepStats) -> None:
        """Completes the numbers of a settled step."""

    def ledger(self) -> dict[str, int]:
        """What is held for requests; zero when idle."""
        return {}


def forget(call: Callable[..., None], *args: Any) -> None:
    """Drops what a request leaves behind. An error ends no request: the next admission writes the same places anew."""
    try:
        call(*args)
    except Exception as error:
        if scope_of(error) == "device":
            raise
        log.exception("the rest of a request could not be dropped")
