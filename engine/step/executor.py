"""Executor: what runs a planned step, on the CPU or on an accelerator, behind one face.

Owner: device thread. In: StepPlans and the slots' requests. Out: StepResults, whose event fires when their tokens can
be read. There are two: CpuExecutor (engine/step/cpu_executor) and DeviceExecutor (engine/step/device_executor). The
loop, the scheduler and admission do not know which of the two they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from _fast.plan import StepPlan
from engine.base.request import Request, TokenLogprob
from engine.grammar.advance import GrammarRows
from engine.step.encode import EncoderCache
from engine.step.graphs import ENCODER_LIMIT, MIXED_LIMIT
from engine.step.result import StepResult
from engine.step.spread import Spread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of every step, fixed at start."""

    max_rows: int  # rows in a step
    max_tokens: int  # tokens in a step
    max_slots: int  # requests running and waiting
    max_model_len: int  # tokens of prompt and answer
    max_chunk: int  # tokens of a row in a step
    block_size: int  # tokens in a KV block
    encoder_rows: int  # tower rows that one item may have
    width: int = 1  # tokens that a row may bring home from one step
    whole_prompts: bool = False  # a prompt is computed in one step

    @property
    def least_tokens(self) -> int:
        """Tokens that every step must have room for."""
        return self.max_model_len if self.whole_prompts else 1

    @property
    def most_graphed(self) -> int:
        """Tokens of the longest steps that are recorded as graphs."""
        return min(self.max_tokens, ENCODER_LIMIT if self.whole_prompts else MIXED_LIMIT)

    @property
    def max_blocks(self) -> int:
        """Entries of one request's block table."""
        return -(-self.max_model_len // self.block_size)


class Executor(Protocol):
    """Runs steps in the order they are launched."""

    plans: list[StepPlan]  # taken in turn; one is free again when its step has been settled
    encoder: EncoderCache
    grammars: GrammarRows
    has_steady_loop: bool  # plain steps can be launched without the GIL (engine/run/steady)
    tile: int  # tokens: a product's time grows by tiles of so many rows, so a step that fills them costs no more

    @property
    def spread(self) -> Spread | None:
        """Of a model with experts: how a step's tokens choose among them."""

    def fullness(self, tokens: int) -> float:
        """How much of the device works on the products of so many tokens, at most 1: what sizes are worth filling."""

    def admit(self, slot: int, request: Request, seed: int, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        """Stages a request's row, which no step in flight knows; `prompt_logprobs` grows as the prompt is computed."""

    def reset(self, slot: int, poison: bool) -> None:
        """Forgets a freed slot; with `poison` its numbers become ones that no live row may use."""

    def wait_until_read(self, plan: StepPlan) -> None:
        """Before the scheduler rewrites a plan: returns when nothing that was launched reads it any more."""

    def launch_forward(self, plan: StepPlan) -> StepResult:
        """Puts towers and forward of a planned step on the stream."""

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        """Puts the choice of tokens on the stream; `done` is called, on any thread, when they can be read early."""

    def collect(self, step: StepResult) -> None:
        """After the step's event: fills tokens, invalid rows and log-probabilities on the host."""

    def compute(self, work: Callable[[], T]) -> T:
        """Runs `work` with the model behind what was launched, and waits for it."""

    def routed_experts(self, slot: int, length: int) -> np.ndarray:
        """Of a traced slot that has just come back, before the next plan: its tokens' experts, [length, layers, k]."""

    def free_unused(self) -> None:
        """After a step that found no room: gives back what is kept of earlier steps for reuse."""

    def ledger(self) -> dict[str, int]:
        """What is held per request; zero when idle. Where there is a device, its bytes and pinned ones too."""

    def close(self) -> None:
        """Waits for what was launched and lets go of the stream."""
