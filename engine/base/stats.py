"""StepStats: a step's counts and times; EngineStats: the running totals that the metrics read.

Owner: StepStats is made on the device thread and handed to the loop with the step's output; EngineStats lives on the
loop and is changed only there. Times are seconds of time.perf_counter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from _fast.step_numbers import StepNumbers

if TYPE_CHECKING:
    from _fast.drafts import Counts


class EncoderCounts(NamedTuple):
    """Counts since start; steps of the GIL-free loop encode nothing and report no counts."""

    calls: int = 0  # runs of towers
    seconds: float = 0.0  # total time of the runs that are known to have ended
    queries: int = 0  # media items of requests
    hits: int = 0  # queried items whose rows were already cached or being computed


class AdapterCounts(NamedTuple):
    """Places of adapters on the device; counts are since start."""

    used: int = 0  # places that hold an adapter now
    swaps: int = 0  # adapters that were moved into a place
    swap_seconds: float = 0.0


class StateCounts(NamedTuple):
    """States of recurrent layers in the prefix cache; counts are since start."""

    named: int = 0  # states in the prefix cache now
    stored: int = 0  # states added to the prefix cache
    hit: int = 0  # states at which a request began
    dropped: int = 0  # states that were evicted, or for which there was no room
    runs_used: int = 0  # runs of blocks, for states and tails, that requests hold now
    attention_hit_tokens: int = 0  # tokens that the prefix cache would have found without states


class DraftCounts(NamedTuple):
    """Speculative decoding, since start, in settled steps."""

    drafts: int = 0  # rows of steps that verified drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts that were the tokens which the row's own sampling chose
    invalid_tokens: int = 0  # drafts for which the drafter's logits were not finite; not among draft_tokens
    accepted_per_place: tuple[int, ...] = ()


class SettledBy(IntEnum):
    """Who settled a step, and how it ended."""

    LOOP = 0  # the GIL-free loop
    PYTHON = 1
    FAILED = 2  # Python: the step raised


@dataclass(slots=True)
class StepStats:
    """One step, as the device thread saw it."""

    step_id: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # computed in this step
    num_sampled: int = 0  # tokens that reached a request
    num_encodes: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0  # since start
    prefix_queries: int = 0  # tokens looked up, since start
    prefix_hits: int = 0  # tokens found, since start
    # Times of the turn that settled this step. schedule_s and launch_s belong to the next step, which that turn planned
    # and launched; they include earlier turns that settled nothing.
    schedule_s: float = 0.0
    launch_s: float = 0.0  # forward and sample launches
    wait_s: float = 0.0  # collect: the only wait
    commit_s: float = 0.0  # commit, and delivery of the previous step's output
    device_s: float = 0.0  # forward start to sampled tokens on the host
    gap_s: float = 0.0  # from the previous step's end to this forward, prep included, by the device's clock; 0: unknown
    launched_at: float = 0.0  # time of the forward's launch; a trace draws the step from these three times
    ended_at: float = 0.0  # time at which the step's tokens could be read
    waited_at: float = 0.0  # time at which the device thread had the tokens
    encoder: EncoderCounts | None = None
    states: StateCounts | None = None  # None: the model has no states, or the GIL-free loop settled the step
    drafts: DraftCounts | None = None  # None: rows have no drafts
    settled: SettledBy = SettledBy.LOOP

    @property
    def by_python(self) -> bool:
        """Python settled the step because of prompts, rules, media or errors; plain steps need no Python."""
        return self.settled != SettledBy.LOOP

    @property
    def failed(self) -> bool:
        """The step raised; its rows ended or started over."""
        return self.settled == SettledBy.FAILED

    @classmethod
    def of(cls, numbers: StepNumbers, blocks_total: int, drafts: Counts | None) -> StepStats:
        """The StepStats of a step of the GIL-free loop."""
        counts = None if drafts is None else DraftCounts(*drafts)
        return cls(**numbers._asdict(), waited_at=numbers.ended_at, blocks_total=blocks_total, drafts=counts)


@dataclass(slots=True)
class EngineStats:
    """Totals and gauges; read by /metrics at any time without waiting for the engine."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    encoder: EncoderCounts = field(default_factory=EncoderCounts)
    failed_steps: int = 0
    python_steps: int = 0  # steps that the GIL-free loop left to Python; included in `steps`
    host_s: float = 0.0  # device thread's own work (everything but waiting)
    states: StateCounts = field(default_factory=StateCounts)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0

    def add(self, step: StepStats) -> None:
        """Folds one step in (loop)."""
        self.steps += step.num_rows > 0  # 0 rows: these numbers belong to no step
        self.running, self.waiting = step.running, step.waiting
        self.blocks_used, self.blocks_total = step.blocks_used, step.blocks_total
        self.preemptions = step.preemptions
        self.prefix_queries, self.prefix_hits = step.prefix_queries, step.prefix_hits
        self.encoder = step.encoder or self.encoder
        self.states = step.states or self.states
        self.drafts = step.drafts or self.drafts
        self.generation_tokens += step.num_sampled
        self.failed_steps += step.settled == SettledBy.FAILED
        self.python_steps += step.settled != SettledBy.LOOP
        self.host_s += step.schedule_s + step.launch_s + step.commit_s
