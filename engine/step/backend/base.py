"""Backend: the protocol of the object that runs an executor's steps, on the host or on an accelerator.

Owner: device thread. In: planned steps (Step). Out: the same steps; a step's event fires when its tokens can be read.
A backend declares its abilities (`Abilities`), so callers never test its class. Both backends have the same files:

    backend   implements this protocol                         buffers   the inputs of a forward from a plan
    forward   forward, sampling, copy of tokens to the host    slots     the state of live requests
    home      the event of a step's tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from _fast.plan import StepPlan
from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.steady import SteadyLoop
from engine.base.mask_lines import Lines
from engine.base.request import SamplingParams
from engine.layers.batch import LayerHook
from engine.step.live import LiveRow
from engine.step.rank import Rank
from engine.step.sizes import Sizes
from engine.step.step import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a backend."""

    graphs: bool  # forwards and sampling are recorded as graphs; a step is launched before the next step is planned
    steady_loop: bool  # plain steps can be launched without the GIL (engine/run/steady)
    tile: int  # rows of a product's tile, in tokens; a product's time depends on the number of tiles


class StepSampler(Protocol):
    """Samples tokens by the rules of live requests, by slot; engine/sampling has a class for each kind of device."""

    def is_plain(self, slots: np.ndarray) -> bool:
        """True if no row of these slots has to wait for the previous step."""

    def allowed_of(self, slot: int) -> np.ndarray | None:
        """bool [vocab]: the tokens that a slot's own rules allow; None: all."""

    def may_sleep(self, slot: int) -> bool:
        """Whether steps of a slot with a sleeping grammar can be plain, because a token sampled too early has no
        effect."""

    def set_asleep(self, slot: int, asleep: bool) -> None:
        """Sets whether a slot's grammar sleeps; if the slot may sleep, its steps are plain meanwhile."""

    def admit(
        self, slot: int, params: SamplingParams, prompt: np.ndarray, seed: int, words: np.ndarray, masked: bool
    ) -> None:
        """Stages a request and completes the slot's `words`, int32 [SLOT_WORDS]; `masked`: each step needs a mask."""

    def guess(self, logits: Tensor, slots: Tensor, run: Tensor, place: Tensor) -> Tensor:
        """On the stream: tokens that a drafter proposes, int32 at the places `run`; -1: its logits are invalid.

        logits [B, vocab]; int32 [B]: the rows' slots; places of the guesses among runs of `width` per row, -1: no
        guess; numbers of the guesses in the answers. A draw takes the noise with which the row itself will draw there.
        """

    def reset(self, slot: int, poison: bool = False) -> None:
        """Clears a freed slot; `poison` writes values that make any later use fail visibly."""


class RuledSampler(StepSampler, Protocol):
    """A sampler that stores its rules in tables on the device."""

    def takes_part(self, slot: int) -> bool:
        """Whether the slot has rules or log-probabilities that need the host in each step."""

    def take_lines(self, slots: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        """Assigns lines of the tables before a step with rows of these slots. Returns the new words of slots that have
        got a line, and the slots that have lost their line."""

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Updates the rules with the tokens of a step's sampled rows (-1: none), before the next step samples."""


class Masks(Protocol):
    """Passes bit masks of allowed tokens (lines) to the sampling of a step."""

    def memory(self, count: int, words: int) -> np.ndarray:
        """A buffer for a step's lines, int32 [count, words]; `send` reads the buffer."""

    def send(self, step: Step, lines: Lines) -> None:
        """Applies the lines to the sampling of the step, which must be launched after this call."""


class Steady(Protocol):
    """The interface between a backend and the GIL-free loop."""

    logprobs_asked: np.ndarray  # uint8 [max_slots]: 1 + the number of top log-probabilities that a slot wants; 0: none
    logprob_lines: Tensor  # int32 [records, max_rows, LINE] on the host, written by kernels/sampling/top_logprobs

    def loop(
        self, scheduler: Scheduler, ring: OutputRing, special: np.ndarray, watched: np.ndarray, wake_fd: int
    ) -> SteadyLoop:
        """Creates the GIL-free loop over the backend's plans and graphs."""

    def adopt(self, plan: StepPlan) -> Step:
        """Wraps a plan that the GIL-free loop launched in a Step, which Python settles. The step before has ended."""


class Backend(Protocol):
    """Runs steps in the order in which they are launched."""

    forward_variant: int  # the bit of the variant with another forward, which reads tokens' adapters; 0: there is none
    drafting_variant: int  # the bit of the variant whose steps have drafts; 0: steps of all variants have
    scan_variant: int  # the bit of the variant whose steps scan chunks of states; 0: all do. A device may keep 0

    @property
    def rank(self) -> Rank:
        """The first or only device."""

    @property
    def sizes(self) -> Sizes:
        """The bounds of every step."""

    @property
    def plans(self) -> list[StepPlan]:
        """The plans, used in turn; a plan is free again once its step has been settled."""

    @property
    def sampler(self) -> StepSampler:
        """Samples the tokens of live requests."""

    @property
    def ruled(self) -> RuledSampler | None:
        """The same sampler if the Rules part runs on this backend, else None."""

    @property
    def masks(self) -> Masks:
        """Passes masks of allowed tokens to each step."""

    @property
    def live_counts(self) -> tuple[Tensor, Tensor] | None:
        """The number of tokens and of sampled rows in the newest step, int32 [1] each on the device; None on a CPU."""

    @property
    def steady(self) -> Steady | None:
        """The interface to the GIL-free loop; None: Python launches every step."""

    @property
    def hooks(self) -> Sequence[LayerHook]:
        """Hooks that run inside each forward."""

    @property
    def can(self) -> Abilities:
        """The backend's abilities; they do not change after its construction."""

    def run(self, call: Callable[..., None], *args: object) -> None:
        """Runs call(*args) on the stream, after all launched work; `call` must not raise."""

    def compute(self, work: Callable[[], T]) -> T:
        """Runs `work`, which uses the model, after all launched work, and waits for the result."""

    def fullness(self, tokens: int) -> float:
        """The fraction of the device's units that products of so many tokens use, 0 to 1; Pace picks full sizes."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages a request in its slot; no step in flight may contain the slot."""

    def send(self, slot: int, words: np.ndarray) -> None:
        """Sends the slot's words, int32 [SLOT_WORDS], to the device with the slot's next step."""

    def reset(self, slot: int, poison: bool) -> None:
        """Clears a freed slot; `poison` writes values that no live row may use."""

    def block_table(self, group: int, slot: int) -> Tensor:
        """The blocks of a slot whose steps have been launched, int32 [max_blocks] in the rank's memory."""

    def wait_until_read(self, plan: StepPlan) -> None:
        """Waits until no launched work reads the plan, so that the scheduler can write the plan again."""

    def step(self, plan: StepPlan) -> Step:
        """Makes the step of a plan; the step is not launched yet."""

    def begin(self, step: Step) -> None:
        """Runs on the stream at the start of the step."""

    def forward(self, step: Step) -> None:
        """On the stream: prepares inputs, runs the forward, and samples unless the step's sampling has to wait."""

    def choose(self, step: Step) -> None:
        """On the stream: samples the tokens of a step whose sampling had to wait."""

    def drafts_of(self, step: Step) -> np.ndarray:
        """The number of drafts that the step verifies in each of its S sampled rows, and the drafts, int32 [S, 1 + K].

        For a step with drafts whose sampling waits; waits for the forward's begin, where the drafts are made.
        """

    def done(self, step: Step, call: Callable[[Step], None]) -> None:
        """Runs after the whole step is launched. A backend that learns early that the tokens can be read then calls
        call(step), on any thread."""

    def collect(self, step: Step, behind: Step | None) -> None:
        """After the step's event: fills Step.home unless Step.error is set; `behind`: the next launched step."""

    def measure_gaps(self, every: int) -> None:
        """Measures the device's idle time after one step in `every` (StepStats.gap_s)."""

    def free_unused(self) -> None:
        """Frees cached memory of earlier steps, after a step that ran out of memory."""

    def ledger(self) -> dict[str, int]:
        """Counts of resources of requests, zero when idle; on a device also its bytes and the pinned bytes."""

    def close(self) -> None:
        """Waits for all launched work and closes the stream."""
