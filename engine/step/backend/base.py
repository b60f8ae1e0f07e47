"""Backend: what runs the steps of an executor, on the host or on an accelerator, and what each of them can do.

Owner: device thread. In: planned steps (Step). Out: the same steps, whose events fire when their tokens can be read.
A backend declares what it can do (`Abilities`); nothing asks for its class. Both have files of the same names:

    backend   the object of this protocol          buffers   inputs of a forward from a plan
    forward   forward, choice, tokens home         slots     state of live requests
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
    """What a backend can do."""

    graphs: bool  # forwards and choices are recorded, and launched before the step behind is planned
    steady_loop: bool  # plain steps can be launched without the GIL (engine/run/steady)
    tile: int  # tokens: a product's time grows by tiles of so many rows, so a step that fills them costs no more


class StepSampler(Protocol):
    """Rules of live requests by slot, and the choice of tokens; engine/sampling has one for each kind of device."""

    def is_plain(self, slots: np.ndarray) -> bool:
        """No row of these slots has to wait for the step before."""

    def allowed_of(self, slot: int) -> np.ndarray | None:
        """bool [vocab]: the tokens that a slot's own rules leave; None for all."""

    def may_sleep(self, slot: int) -> bool:
        """Whether steps of a slot whose mask has not begun are plain, and a token chosen too early leaves no trace."""

    def set_asleep(self, slot: int, asleep: bool) -> None:
        """Says that a slot's mask has not begun, or has; steps of a slot that may sleep are plain until then."""

    def admit(
        self, slot: int, params: SamplingParams, prompt: np.ndarray, seed: int, words: np.ndarray, masked: bool
    ) -> None:
        """Stages a request; `words` int32 [SLOT_WORDS] of the slot are completed; `masked`: it has a mask by step."""

    def reset(self, slot: int, poison: bool = False) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that show at once."""


class RuledSampler(StepSampler, Protocol):
    """A sampler whose rules lie in tables on the device."""

    def takes_part(self, slot: int) -> bool:
        """The slot has rules, or log-probabilities, that take work of the host by step."""

    def take_lines(self, slots: np.ndarray) -> tuple[list[np.ndarray], list[int]]:
        """Before a step with rows of these slots: the new words of those that have a line now, and slots that have
        lost theirs."""

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens of a step's sampled rows (-1: none), before the next choice."""


class Masks(Protocol):
    """Lines of allowed tokens on their way to the choice of a step."""

    def memory(self, count: int, words: int) -> np.ndarray:
        """Where a step's lines are written, int32 [count, words]; `send` takes them."""

    def send(self, step: Step, lines: Lines) -> None:
        """The choice of the step, launched from now on, obeys the lines."""


class Steady(Protocol):
    """What the GIL-free loop needs of a backend that has one."""

    logprobs_asked: np.ndarray  # uint8 [max_slots]: 1 + how many of the most likely tokens a slot's rows bring; 0: none
    logprob_lines: Tensor  # int32 [records, max_rows, LINE] on the host, as kernels/sampling/top_logprobs writes them

    def loop(
        self, scheduler: Scheduler, ring: OutputRing, special: np.ndarray, watched: np.ndarray, wake_fd: int
    ) -> SteadyLoop:
        """The loop over the backend's plans and graphs."""

    def adopt(self, plan: StepPlan) -> Step:
        """A plain step that the loop launched, as Python settles it; the one before it has been waited for."""


class Backend(Protocol):
    """Runs steps in the order in which they are launched."""

    @property
    def rank(self) -> Rank:
        """The first device, or the only one."""

    @property
    def sizes(self) -> Sizes:
        """Of every step."""

    @property
    def plans(self) -> list[StepPlan]:
        """Taken in turn; one is free again when its step has been settled."""

    @property
    def sampler(self) -> StepSampler:
        """How the tokens of live requests are chosen."""

    @property
    def ruled(self) -> RuledSampler | None:
        """The same, where rules are a part of steps."""

    @property
    def masks(self) -> Masks:
        """Which tokens rows may choose, by step."""

    @property
    def live_counts(self) -> tuple[Tensor, Tensor] | None:
        """int32 [1] each, on a device: the newest step's tokens, and its sampled rows."""

    @property
    def steady(self) -> Steady | None:
        """None: the loop of Python launches every step."""

    @property
    def hooks(self) -> Sequence[LayerHook]:
        """Called inside each forward."""

    @property
    def can(self) -> Abilities:
        """Declared, and fixed once the backend is made."""

    def run(self, call: Callable[..., None], *args: object) -> None:
        """Runs call(*args), which does not raise, on the stream, behind what was launched."""

    def compute(self, work: Callable[[], T]) -> T:
        """Runs `work` with the model behind what was launched, and waits for it."""

    def fullness(self, tokens: int) -> float:
        """How much of the device works on the products of so many tokens, at most 1: what sizes are worth filling."""

    def admit(self, slot: int, row: LiveRow, words: np.ndarray) -> None:
        """Stages a request's row, which no step in flight knows."""

    def send(self, slot: int, words: np.ndarray) -> None:
        """The slot's words, int32 [SLOT_WORDS], from its next step on."""

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that no live row may use."""

    def block_table(self, group: int, slot: int) -> Tensor:
        """int32 [max_blocks] where the rank computes: the blocks of a slot whose steps have been launched."""

    def wait_until_read(self, plan: StepPlan) -> None:
        """Before the scheduler rewrites a plan: returns when nothing that was launched reads it any more."""

    def step(self, plan: StepPlan) -> Step:
        """The step of a plan, to be launched."""

    def begin(self, step: Step) -> None:
        """On the stream: the step is the next."""

    def forward(self, step: Step) -> None:
        """On the stream: inputs, forward, and the choice where the step does not wait for it."""

    def choose(self, step: Step) -> None:
        """On the stream: the choice of a step that waited."""

    def done(self, step: Step, call: Callable[[Step], None]) -> None:
        """All of a step is launched; call(step) on any thread when its tokens can be read, where that comes early."""

    def collect(self, step: Step, behind: Step | None) -> None:
        """After the step's event: fills Step.home, or leaves Step.error as it is. `behind`: the step launched since."""

    def measure_gaps(self, every: int) -> None:
        """Has a device's idle time measured behind one step in `every` (StepStats.gap_s)."""

    def free_unused(self) -> None:
        """After a step that ran out of memory: frees the memory of earlier steps that is cached for reuse."""

    def ledger(self) -> dict[str, int]:
        """What is held per request; zero when idle. Where there is a device, its bytes and pinned ones too."""

    def close(self) -> None:
        """Waits for what was launched and lets go of the stream."""
