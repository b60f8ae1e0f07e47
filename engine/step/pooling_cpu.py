"""CpuPoolingExecutor: steps on the CPU whose rows end with an array in the place of a token.

Owner: device thread launches; the stream's thread runs. A row whose last token is in the step brings home no token
(TokenCode.END), which ends its request, and its pooled line; rows of middle chunks bring home nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from engine.base.config import EngineConfig
from engine.base.request import Request, TokenLogprob
from engine.cache.layout import CacheLayout
from engine.cache.spec import LayerCache
from engine.device.host import HostEvent
from engine.models.base.model import Model
from engine.step.build import apply_updates, build
from engine.step.cpu_executor import CpuExecutor, CpuStep
from engine.step.executor import Sizes
from engine.step.pooled_rows import TokenwiseRows, take_lines
from engine.step.result import StepResult


class CpuPoolingExecutor(CpuExecutor):
    """The CPU's executor of a model with a pooler."""

    def __init__(
        self, config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, caches: list[LayerCache]
    ) -> None:
        super().__init__(config, model, sizes, layout, caches)
        assert model.pooler is not None
        self._pooler = model.pooler
        self._tokenwise = TokenwiseRows(sizes.max_slots)
        self._seconds = np.zeros(sizes.max_slots, np.int32)  # by slot: where the second text of a pair begins
        self._counted = np.zeros(sizes.max_slots, np.int32)  # by slot: the first token that counts in its pooled row

    def admit(self, slot: int, request: Request, seed: int, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        self._slots.admit(slot, request)
        self._tokenwise.admit(slot, request.pooling)
        pair = None if request.pooling is None else request.pooling.seconds
        self._seconds[slot] = 0 if pair is None else pair[0]
        counted = None if request.pooling is None else request.pooling.pool_starts
        self._counted[slot] = 0 if counted is None else counted[0]

    def reset(self, slot: int, poison: bool) -> None:
        self._slots.reset(slot, poison)
        self._tokenwise.reset(slot)

    def ledger(self) -> dict[str, int]:
        return super().ledger() | {"tokenwise": len(self._tokenwise)}

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        assert isinstance(step, CpuStep)
        self.stream.launch(self._finish, step, done)

    def collect(self, step: StepResult) -> None:
        """The stream has filled the step."""

    # -- on the stream ----------------------------------------------------------------------------------------------

    def _forward(self, step: CpuStep) -> None:
        step.started_at = time.perf_counter()
        try:
            apply_updates(step.plan, self._slots)
            rows, sampled = step.rows, step.rows.sampled
            if step.plan.num_encodes:
                self.encoder.advance(step.plan)
            media = self.encoder.take(step) if step.plan.num_media else []
            batch = build(step.plan, rows, self._slots, self._layout, media, self._caches, self._axes, self._vocab)
            batch.second_start = torch.from_numpy(self._seconds[rows.slots])
            if not self._pooler.config.pools_prompt:
                batch.pool_start = torch.from_numpy(self._counted[rows.slots])
            outside = self._slots.outside[rows.slots[sampled]]
            if not self._tokenwise.any(rows.slots):
                lines = self._pooler.lines(batch, len(sampled), self.model.forward)
                take_lines(step, lines.numpy(), outside, self._vocab)
                return
            index, batch.sample_index = batch.sample_index, None
            assert index is not None
            hidden = self.model.forward(batch)  # [num_tokens, hidden]
            take_lines(step, self._pooler.lines_of(hidden, batch, index).numpy(), outside, self._vocab)
            self._tokenwise.take(step, self._pooler.project_tokens(hidden).numpy())
        except Exception as error:
            step.error = error

    def _finish(self, step: CpuStep, done: Callable[[StepResult], None]) -> None:
        assert isinstance(step.event, HostEvent)
        step.event.fire()
        done(step)
