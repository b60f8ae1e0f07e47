"""DevicePoolingExecutor: steps on an accelerator whose rows end with an array; PoolingStartup makes it ready.

Owner: device thread, for everything here. A step of up to Sizes.most_graphed tokens is one graph: forward, pooler, and
the kernels that write lines and marks into pinned memory. Longer ones are launched kernel by kernel, as are steps whose
rows want the lines of their tokens. Nothing is fed from step to step, so two in flight need no care.

    host    plan n+1 |                                            plan n+2 |
    device  ... step n, lines n home | step n+1: prep reads its plan, forward, pooler, lines home | ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from _fast.layout import SLOT_WORDS, GraphKind, SlotWord, TokenCode
from _fast.plan import StepPlan
from engine.base.config import EngineConfig
from engine.base.request import Request, TokenLogprob
from engine.cache.layout import CacheLayout
from engine.cache.sizing import device_blocks
from engine.device.accelerator import Accelerator
from engine.encoders.tower import each
from engine.grammar.advance import GrammarRows
from engine.kernels.gemm.algorithms import Products
from engine.kernels.pool_home import pool_home
from engine.kernels.target import target
from engine.kernels.tune import fullness
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.sampling.pending import home
from engine.step.buffers import RECORDS, StepBuffers
from engine.step.build import RowArrays
from engine.step.device_executor import DeviceStep, TokensHome
from engine.step.encode import EncoderCache
from engine.step.executor import Sizes, T
from engine.step.graphs import mixed_sizes, one_size_per_doubling
from engine.step.pooled_rows import TokenwiseRows, take_lines
from engine.step.result import StepResult
from engine.step.slots import SlotState
from engine.step.startup import GRAPH_BYTES, Startup
from engine.step.upload_ring import UploadRing

Shown = tuple[int, int, torch.Tensor]  # where a medium's rows begin in the step, how many they are, and the rows


@dataclass(slots=True, kw_only=True)
class PooledStep(DeviceStep):
    """A step in flight on an accelerator."""

    token_lines: torch.Tensor | None = None  # float32 [num_tokens, width] in host memory, on their way


class DevicePoolingExecutor:
    """The accelerator's executor of a model with a pooler."""

    has_steady_loop = False  # every row ends with its step, which is Python's
    tile = 128
    spread = None  # the experts of texts that are pooled are not watched

    def __init__(
        self, config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, accelerator: Accelerator
    ) -> None:
        assert model.pooler is not None
        self.config, self.model, self.sizes, self.accelerator = config, model, sizes, accelerator
        self.layout, self._pooler = layout, model.pooler
        sees = bool(model.towers)
        self.encoder = EncoderCache(model, not config.deterministic, UploadRing(accelerator) if sees else None)
        self.grammars = GrammarRows(0)  # for nobody
        buffers = self.buffers = StepBuffers(model, sizes, layout, accelerator, config.deterministic, sees)
        self.plans = buffers.plans
        width = self._pooler.width(model.config.text.hidden_size)
        lines = accelerator.pinned(RECORDS * sizes.max_rows * width).view(torch.float32)
        self._lines = lines.view(RECORDS, sizes.max_rows, width)
        self.launcher = accelerator.launcher(buffers.records.pinned, buffers.records.turn, buffers.ring)
        self._host = SlotState(sizes.max_slots, 1, 1, model.config.ahead)  # only positions and joints are read
        self._tokenwise = TokenwiseRows(sizes.max_slots)
        self._newest: PooledStep | None = None

    # -- what is launched, and recorded as graphs at start ----------------------------------------------------------

    def forward_into(self, kind: int, tokens: int) -> None:
        """A step of `tokens` padded tokens, to the end: of up to as many rows, all of whose lines go home."""
        assert kind == GraphKind.MIXED
        rows = min(tokens, self.sizes.max_rows)
        self._send(self._pooler.lines(self._batch(tokens, rows, rows), rows, self.model.forward))

    def _batch(self, tokens: int, rows: int, ends: int, media: Sequence[Shown] = ()) -> Batch:
        buffers = self.buffers
        batch = buffers.batch(tokens, rows, False, list(media))
        batch.sample_index = buffers.inputs.sample_index[:ends]
        if self.model.reads_pairs:
            seconds = buffers.slots.word(SlotWord.SECOND_START)
            batch.second_start = seconds.index_select(0, buffers.inputs.row_slot[:rows].long())
        if not self._pooler.config.pools_prompt:
            counted = buffers.slots.word(SlotWord.POOL_START)
            batch.pool_start = counted.index_select(0, buffers.inputs.row_slot[:rows].long())
        return batch

    def _send(self, lines: torch.Tensor) -> None:
        """Lines [rows, width] and the rows' marks go home."""
        pool_home(self._lines, lines, self.buffers.inputs.home)
        self.buffers.send_tokens()  # nobody chooses any: rows bring home END, or that an id was no token

    # -- requests ---------------------------------------------------------------------------------------------------

    def fullness(self, tokens: int) -> float:
        if self.config.deterministic:
            return 1.0
        text = self.model.config.text
        return fullness(target(), tokens, text.intermediate_size, text.hidden_size)

    def admit(self, slot: int, request: Request, seed: int, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        words = np.zeros(SLOT_WORDS, np.int32)
        words[SlotWord.SLOT], words[SlotWord.PROMPT_LEN] = slot, len(request.prompt_token_ids)
        words[SlotWord.ADAPTER] = request.adapter(self.model.adapters)
        if request.pooling is not None and request.pooling.seconds is not None:
            words[SlotWord.SECOND_START] = request.pooling.seconds[0]
        if request.pooling is not None and request.pooling.pool_starts is not None:
            words[SlotWord.POOL_START] = request.pooling.pool_starts[0]
        self.buffers.params.stage(slot, words)
        self._host.admit(slot, request)
        self._tokenwise.admit(slot, request.pooling)

    def reset(self, slot: int, poison: bool) -> None:
        self.buffers.params.forget(slot)
        self._host.reset(slot, poison)
        self._tokenwise.reset(slot)

    def ledger(self) -> dict[str, int]:
        held = {"positions": len(self._host.positions), "tokenwise": len(self._tokenwise)}
        return held | self.accelerator.ledger()

    def compute(self, work: Callable[[], T]) -> T:
        return work()  # this thread launches on the stream

    def routed_experts(self, slot: int, length: int) -> np.ndarray:
        raise AssertionError("inputs that are pooled are not traced")

    def free_unused(self) -> None:
        self.accelerator.free_unused()

    # -- steps ------------------------------------------------------------------------------------------------------

    def wait_until_read(self, plan: StepPlan) -> None:
        self.launcher.wait_until_read(self.plans.index(plan))

    def launch_forward(self, plan: StepPlan) -> StepResult:
        number = self.plans.index(plan)
        step = PooledStep(plan, RowArrays(plan), event=TokensHome(self.launcher, number), number=number)
        self._newest = step
        try:
            encoded = plan.num_encodes and self.encoder.advance(plan)
            media = self.encoder.take(step) if plan.num_media else []
            self.buffers.params.pack(plan)
            self.buffers.send_positions(plan, step.rows, self._host)
            per_token = self._tokenwise.any(step.rows.slots)
            size = 0 if per_token else self.launcher.pick(GraphKind.MIXED, plan.num_tokens)
            if encoded or media or not size:
                step.plan_at = step.launched_at  # its time is a guess: what follows is planned at once
            if size:
                self._replay(plan, number, size, media)
            else:
                self.launcher.prep(plan, number)
                self._run_eagerly(step, per_token, media)
                self.launcher.finish()
            step.event.asked = True
        except Exception as error:
            step.error = error
        return step

    def _replay(self, plan: StepPlan, number: int, size: int, media: list[Shown]) -> None:
        if not media:
            self.launcher.launch(plan, number, GraphKind.MIXED, size, 0)
            return
        try:
            self.buffers.show(media)
            self.launcher.launch(plan, number, GraphKind.MIXED, size, 0)
        finally:
            self.buffers.hide()

    def _run_eagerly(self, step: PooledStep, per_token: bool, media: list[Shown]) -> None:
        plan, pooler = step.plan, self._pooler
        batch = self._batch(plan.num_tokens, plan.num_rows, plan.num_sampled, media)
        if not per_token:
            self._send(pooler.lines(batch, plan.num_sampled, self.model.forward))
            return
        ends, batch.sample_index = batch.sample_index, None
        assert ends is not None
        hidden = self.model.forward(batch)  # [num_tokens, hidden_size]
        self._send(pooler.lines_of(hidden, batch, ends))
        step.token_lines = home(pooler.project_tokens(hidden))

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        """Nothing waits for the step before: all of a step is launched with its forward."""

    def collect(self, step: StepResult) -> None:
        assert isinstance(step, PooledStep)
        step.started_at = max(step.started_at, step.launched_at)
        if self._newest is not None and self._newest is not step:
            self._newest.started_at = step.event.fired_at  # the device goes on with it at once
            self._newest.began_before = step.event.found_done
        if step.error is not None:
            return
        step.gap_s = self.launcher.gap_s
        sampled = step.rows.sampled
        outside = self.buffers.ring[step.number].numpy()[sampled, 0] == TokenCode.OUTSIDE
        lines = self._lines[step.number, : len(sampled)].numpy().copy()  # the buffer is written again
        take_lines(step, lines, outside, self.model.config.text.vocab_size)
        if step.token_lines is not None:
            self._tokenwise.take(step, step.token_lines.numpy())

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a lost device has nothing left to wait for
            self.accelerator.close()


class PoolingStartup(Startup):
    """The start of such an executor; the phases are those of `Startup`."""

    _executor: DevicePoolingExecutor  # type: ignore[assignment]

    def __init__(self, executor: DevicePoolingExecutor) -> None:
        super().__init__(executor)  # type: ignore[arg-type]

    def _walk(self, products: Products) -> None:
        sizes = self._sizes
        with self._accelerator.algorithms.recording() as recorded:
            for size in one_size_per_doubling(sorted({*mixed_sizes(sizes.most_graphed), sizes.max_tokens})):
                self._executor.forward_into(GraphKind.MIXED, size)
        products.update(recorded)
        for tower in each(self._model.towers):
            tower.encode(tower.example(tower.modalities[0], 1))
        self._encode_largest(sizes.encoder_rows)

    def profile(self) -> int:
        sizes = self._sizes
        with self._one_block():
            self._buffers.prep()
            step = peak = self._accelerator.peak_of(self._largest)
            if self._model.towers:
                peak = max(step, self._accelerator.peak_of(partial(self._encode_largest, sizes.encoder_rows)))
        return device_blocks(
            self._config, self._layout, sizes.max_model_len, sizes.max_chunk, sizes.max_rows,
            peak_bytes=peak,
            graph_bytes=step + GRAPH_BYTES,
            memory=self._accelerator.memory(),
        )  # fmt: skip

    def _largest(self) -> None:
        self._executor.forward_into(GraphKind.MIXED, self._sizes.max_tokens)

    def capture(self) -> None:
        capture, sizes = self._accelerator.capture, self._sizes
        self._launcher.set_graph(GraphKind.PREP, 0, 1, capture(self._buffers.prep))
        if not self._config.enforce_eager:
            for size in reversed(mixed_sizes(sizes.most_graphed)):
                with self._model.abridged():
                    self._executor.forward_into(GraphKind.MIXED, size)
                graph = capture(partial(self._executor.forward_into, GraphKind.MIXED, size), met=True)
                self._launcher.set_graph(GraphKind.MIXED, 0, size, graph)
        if self._config.enforce_eager or sizes.max_tokens > sizes.most_graphed:
            self._largest()  # leaves its room for steps without a graph
