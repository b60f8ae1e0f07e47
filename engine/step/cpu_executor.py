"""CpuExecutor: steps on the CPU, launched onto a HostStream that stands where an accelerator's stream would.

Owner: device thread launches; the stream's thread runs. In: plans. Out: StepResults; the stream puts each into the
inbox when it is done, so that the loop need not guess how long a step takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from _fast.layout import TokenCode
from _fast.plan import StepPlan
from engine.base.config import EngineConfig
from engine.base.request import Request, TokenLogprob
from engine.cache.layout import CacheLayout
from engine.cache.routed import routed_ids
from engine.cache.spec import LayerCache
from engine.device.host import HostEvent, HostStream
from engine.grammar.advance import GrammarRows
from engine.models.base.model import Model
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler
from engine.step.build import RowArrays, apply_updates, build
from engine.step.encode import EncoderCache
from engine.step.executor import Sizes, T
from engine.step.prompts import PromptLogprobs
from engine.step.result import StepResult
from engine.step.slots import SlotState
from engine.step.spread import HostSpread


@dataclass(slots=True)
class CpuStep(StepResult):
    """A step on the stream of a CPU."""

    logits: torch.Tensor | None = None  # [num_sampled, vocab] float32, between forward and sample


class CpuExecutor:
    """The CPU's executor."""

    has_steady_loop = False  # the stream itself is a thread of Python's
    tile = 16

    def __init__(
        self, config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, caches: list[LayerCache]
    ) -> None:
        rows, tokens = sizes.max_rows, sizes.max_tokens
        # A plan is written while the step before it runs, never while its own last step does: two are enough.
        updates = rows * len(layout.groups) * (sizes.max_blocks + 1)
        self.plans = [StepPlan(rows, tokens, updates, width=sizes.width) for _ in range(2)]
        self.encoder = EncoderCache(model)
        self.model = model
        self._axes = model.config.axes
        self._layout = layout
        self._caches = caches
        self._slots = SlotState(
            sizes.max_slots, sizes.max_blocks, len(layout.groups), model.config.ahead, model.adapters
        )
        self._vocab = model.config.text.vocab_size
        self._sampler = Sampler(sizes.max_slots, self._vocab, config.logprobs_mode)
        self._prompts = PromptLogprobs(config.logprobs_mode.endswith("_logits"), self._vocab)
        self.grammars = GrammarRows(sizes.max_slots, jumps=config.jump_forward is not False)
        keeps = config.return_routed_experts and model.pooler is None
        self.routed = routed_ids(keeps, model.config.text, layout)
        self.stream = HostStream()
        self.spread = HostSpread(model, self.stream) if model.sparse else None

    def fullness(self, tokens: int) -> float:
        return 1.0

    def admit(self, slot: int, request: Request, seed: int, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        self._slots.admit(slot, request)
        prompt, has_grammar = np.asarray(request.prompt_token_ids), request.grammar is not None
        self._sampler.admit(slot, request.sampling, prompt, seed, has_grammar)
        if request.grammar is not None:
            self.grammars.admit(slot, request.grammar, request.sampling)
        if prompt_logprobs is not None:
            self._prompts.asked[slot] = (request, prompt_logprobs)

    def reset(self, slot: int, poison: bool) -> None:
        self._slots.reset(slot, poison)
        self._sampler.reset(slot, poison)
        if slot in self.grammars.rows:
            self.grammars.reset(slot)
        self._prompts.asked.pop(slot, None)

    def wait_until_read(self, plan: StepPlan) -> None:
        """Nothing to wait for: a plan's step has been settled before its turn comes again."""

    def launch_forward(self, plan: StepPlan) -> StepResult:
        step = CpuStep(plan, RowArrays(plan))
        self.stream.launch(self._forward, step)
        return step

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        assert isinstance(step, CpuStep)
        slots = step.rows.slots[step.rows.sampled]
        if self.grammars.rows:
            step.lines = self.grammars.fill(slots, _zeros, self._sampler.allowed_of)
        self.stream.launch(self._sample, step, done)

    def collect(self, step: StepResult) -> None:
        """The stream has filled the step; grammars take its tokens."""
        if step.error is None and self.grammars.rows:
            step.consume(self.grammars)

    def compute(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self.stream.launch(_answer, work, done)
        return done.result()

    def routed_experts(self, slot: int, length: int) -> np.ndarray:
        """Its table is written no more, and the step in flight writes other blocks."""
        assert self.routed is not None
        return self.routed.read(torch.from_numpy(self._slots.block_tables[self.routed.group, slot]), length)

    def free_unused(self) -> None:
        """Nothing to do: nothing is kept."""

    def ledger(self) -> dict[str, int]:
        held = {"positions": len(self._slots.positions), "prompt_logprobs": len(self._prompts.asked)}
        return held | self.grammars.ledger()

    def close(self) -> None:
        self.stream.close()

    # -- on the stream ----------------------------------------------------------------------------------------------

    def _forward(self, step: CpuStep) -> None:
        step.started_at = time.perf_counter()
        try:
            apply_updates(step.plan, self._slots)
            if step.plan.num_encodes:
                self.encoder.advance(step.plan)
            media = self.encoder.take(step) if step.plan.num_media else []
            batch = build(step.plan, step.rows, self._slots, self._layout, media, self._caches, self._axes, self._vocab)
            if self.routed is not None:
                batch.routed = self.routed.of_step(batch.attention[self.routed.group].slot_mapping)
            due = self._prompts.due(step.rows) if self._prompts.asked else None
            index = batch.sample_index
            assert index is not None
            if due or len(index) == step.plan.num_tokens:  # every token is read
                batch.sample_index = None
            hidden = self.model.forward(batch)  # [num_tokens or num_sampled, hidden]
            if due:
                due.tell(prompt_logprobs(self.model.logits, hidden, due.asked, self._vocab, self._prompts.as_logits))
            if len(index):
                step.logits = self.model.logits(hidden[index] if due else hidden)  # [num_sampled, vocab] float32
        except Exception as error:
            step.error = error

    def _sample(self, step: CpuStep, done: Callable[[StepResult], None]) -> None:
        try:
            tokens = np.empty(0, np.int64)
            if step.error is None and step.logits is not None:
                rows = step.rows.sampled
                slots = step.rows.slots[rows]
                index = step.rows.computed[rows] + step.rows.lens[rows] - self._slots.prompt_len[slots]
                chosen, logprobs = self._sampler.sample(step.logits, slots, index, step.lines)
                step.logprobs = {int(rows[k]): entry for k, entry in logprobs.items()}
                self._slots.last_token[slots] = np.maximum(chosen, 0)
                tokens = np.where(self._slots.outside[slots], int(TokenCode.OUTSIDE), chosen)
            if step.error is None:
                step.take_tokens(tokens[:, None], self._vocab)
            step.logits = None
        except Exception as error:
            step.error = error
        assert isinstance(step.event, HostEvent)
        step.event.fire()
        done(step)


def _zeros(count: int, words: int) -> np.ndarray:
    return np.zeros((count, words), np.int32)


def _answer(work: Callable[[], T], done: Future[T]) -> None:
    """On the stream; a fault is the asker's."""
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
