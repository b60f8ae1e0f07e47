"""DeviceExecutor: steps on an accelerator. A plain decode step is a graph; anything special is Python.

Owner: device thread, for everything here. A step whose rows ask for nothing special is launched whole at once, its
choice of tokens included; one with special rows (engine/sampling/device) samples after the step before it has been
settled. A step with prompt log-probabilities, or more tokens than any graph holds, runs its forward eagerly.

    host    plan n+1 |                                      plan n+2 |
    device  ... step n, tokens n home | step n+1: prep reads its plan, forward, sample, tokens home | ...

Decode sizes are recorded twice: whole for plain steps, and in parts for mixed and special ones, whose choice waits for
the host, and where a gap is measured. That costs the start some ten milliseconds a size, and no step anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from _fast.clock import FOUND_DONE
from _fast.layout import SLOT_WORDS, GraphKind, SlotWord
from _fast.plan import StepPlan
from _fast.ring import OutputRing
from _fast.scheduler import Scheduler
from _fast.steady import SPECIAL_ALWAYS, SPECIAL_PROMPT, SPECIAL_WATCHED, SteadyLoop
from engine.base.config import EngineConfig
from engine.base.request import Request, TokenLogprob
from engine.cache.layout import CacheLayout
from engine.cache.routed import routed_ids
from engine.device.accelerator import Accelerator
from engine.grammar.advance import GrammarRows
from engine.grammar.masks import LineUpload
from engine.kernels.target import target
from engine.kernels.tune import fullness
from engine.layers.batch import Batch
from engine.models.base.model import Model
from engine.sampling.device import DeviceSampler, Pending, prompt_logprobs
from engine.step.buffers import StepBuffers
from engine.step.build import RowArrays
from engine.step.encode import EncoderCache
from engine.step.executor import Sizes, T
from engine.step.prompts import Due, PromptLogprobs
from engine.step.result import StepResult
from engine.step.slots import SlotState
from engine.step.spread import device_spread
from engine.step.upload_ring import UploadRing

WATCHED = 4  # tokens that may wake a sleeping grammar without Python looking at each

if TYPE_CHECKING:
    from _fast.launcher import Launcher


class TokensHome:
    """Fires when a step's tokens are in the pinned ring; at once when the step failed before it asked for them."""

    __slots__ = ("_launcher", "_record", "asked", "fired_at", "found_done")

    def __init__(self, launcher: Launcher, record: int) -> None:
        self._launcher = launcher
        self._record = record
        self.asked = False
        self.fired_at = 0.0
        self.found_done = False

    def wait(self, timeout: float) -> bool:
        """Blocks without the GIL. A device that never answers is noticed by the loop, which watches this thread."""
        begun = time.perf_counter()
        done = not self.asked or self._launcher.wait(self._record, timeout)
        self.fired_at = time.perf_counter()
        self.found_done = self.fired_at - begun < FOUND_DONE
        return done


@dataclass(slots=True, kw_only=True)
class DeviceStep(StepResult):
    """A step in flight on an accelerator."""

    event: TokensHome
    number: int  # of its record, and of the ring's line
    plain: bool = False  # its choice of tokens was launched with its forward
    pending: Pending | None = None  # log-probabilities on their way home
    owed: tuple[Due, Pending] | None = None  # and those of prompts


class DeviceExecutor:
    """The accelerator's executor; engine/step/startup makes it ready for steps."""

    tile = 128  # of the products' matrix tiles on every card that is served

    def __init__(
        self, config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, accelerator: Accelerator
    ) -> None:
        self.config, self.model, self.sizes, self.accelerator = config, model, sizes, accelerator
        self.layout, self.has_steady_loop = layout, accelerator.has_steady_loop
        overlays = len(model.config.modalities) > 1 or config.enable_prompt_embeds
        self.encoder = EncoderCache(model, not config.deterministic, UploadRing(accelerator) if overlays else None)
        buffers = self.buffers = StepBuffers(model, sizes, layout, accelerator, config.deterministic, overlays)
        text = model.config.text
        self.buffers.routed = routed_ids(config.return_routed_experts, text, layout, accelerator)
        self.spread = device_spread(model, sizes.max_tokens, self.buffers.inputs, accelerator)
        self.plans = self.buffers.plans
        self._host = SlotState(sizes.max_slots, 1, 1, model.config.ahead)  # only positions and joints are read
        self.sampler = DeviceSampler(
            self.buffers.slots, sizes.max_slots, sizes.max_rows, text.vocab_size,
            accelerator.device, config.logprobs_mode, config.max_logprobs, self.buffers.told,
        )  # fmt: skip
        self.grammars = GrammarRows(sizes.max_slots, jumps=config.jump_forward is True)
        self.upload = LineUpload(accelerator, self.sampler.allowed_table, sizes.max_rows)
        self.prompts = PromptLogprobs(config.logprobs_mode.endswith("_logits"), text.vocab_size)
        self.launcher = accelerator.launcher(buffers.records.pinned, buffers.records.turn, buffers.ring)
        self._special = np.zeros(sizes.max_slots, np.uint8)  # by slot: which steps the GIL-free loop leaves alone
        self._watched = np.full((sizes.max_slots, WATCHED), -1, np.int32)  # by slot: tokens that wake its grammar
        self._newest: DeviceStep | None = None

    # -- what is launched, and recorded as graphs at start ----------------------------------------------------------

    def decode(self, rows: int) -> None:
        """Prep, and a token for each of up to `rows` rows, all of which sample: hidden states stay where they are."""
        buffers = self.buffers
        buffers.prep()
        self._choose(self.model.forward(buffers.batch(rows, rows, True, [])))

    def forward_into(self, kind: int, tokens: int) -> None:
        """A forward of `tokens` padded tokens, and the hidden states of its sampled rows into their fixed place."""
        rows = min(tokens, self.sizes.max_rows)
        self._keep_sampled(self.buffers.batch(tokens, rows, kind == GraphKind.DECODE, []), rows)

    def _keep_sampled(self, batch: Batch, count: int) -> None:
        """The forward of which the first `count` sampled rows are read, at most one for each token."""
        if count == len(batch.token_ids):  # nothing to leave out: one gather at the end is fewer than two before it
            self._gather_sampled(self.model.forward(batch), count)
            return
        batch.sample_index = self.buffers.inputs.sample_index[:count]
        batch.num_sampled = self.buffers.inputs.num_sampled
        self.model.forward(batch, self.buffers.sampled_hidden[:count])

    def _gather_sampled(self, hidden: torch.Tensor, count: int) -> None:
        """Of all tokens' hidden states [tokens, hidden_size] those of the first `count` sampled rows."""
        buffers = self.buffers
        torch.index_select(hidden, 0, buffers.inputs.sample_index[:count], out=buffers.sampled_hidden[:count])

    def choose_into(self, rows: int) -> None:
        """A token for each of the first `rows` sampled rows that is one."""
        self._choose(self.buffers.sampled_hidden[:rows])

    def _choose(self, hidden: torch.Tensor) -> None:
        """From the hidden states of sampled rows [rows, hidden_size] to their tokens, and those on their way home."""
        buffers = self.buffers
        self.sampler.launch_plain(buffers.inputs, self.model.logits(hidden), buffers.tokens)
        buffers.send_tokens()

    # -- requests ---------------------------------------------------------------------------------------------------

    def fullness(self, tokens: int) -> float:
        if self.config.deterministic:  # products of its own, which are as full with any number of tiles
            return 1.0
        text = self.model.config.text
        if text.routings:  # their pairs fill tiles by how tokens choose, not by their number
            return 1.0
        return fullness(target(), tokens, text.intermediate_size, text.hidden_size)

    def admit(self, slot: int, request: Request, seed: int, prompt_logprobs: list[TokenLogprob | None] | None) -> None:
        words = np.zeros(SLOT_WORDS, np.int32)
        words[SlotWord.SLOT], words[SlotWord.PROMPT_LEN] = slot, len(request.prompt_token_ids)
        words[SlotWord.POSITION_DELTA] = request.position_delta
        words[SlotWord.ADAPTER] = request.adapter(self.model.adapters)
        prompt, has_grammar = np.asarray(request.prompt_token_ids), request.grammar is not None
        self.sampler.admit(slot, request.sampling, prompt, seed, words, has_grammar)
        if request.grammar is not None:
            self.grammars.admit(slot, request.grammar, request.sampling)
            self._watch(slot)
        self.buffers.params.stage(slot, words)
        # Prompts are Python's: their first token is told with what the prompt's arrival left to tell.
        self._special[slot] = self._how_special(slot)
        self._host.admit(slot, request)
        if prompt_logprobs is not None:
            self.prompts.asked[slot] = (request, prompt_logprobs)

    def _how_special(self, slot: int) -> int:
        if not self.sampler.is_plain(np.array([slot])):
            return SPECIAL_ALWAYS
        return SPECIAL_PROMPT | SPECIAL_WATCHED * bool(self._watched[slot, 0] >= 0)

    def _watch(self, slot: int) -> None:
        """A grammar has begun to sleep or is awake: says which tokens wake it, and whose steps its slot's are."""
        wakers = self.grammars.rows[slot].waits_for[: WATCHED + 1]
        asleep = 0 < len(wakers) <= WATCHED
        self._watched[slot] = -1
        if asleep:
            self._watched[slot, : len(wakers)] = wakers
        self.sampler.set_asleep(slot, asleep)
        self._special[slot] = self._how_special(slot)

    def reset(self, slot: int, poison: bool) -> None:
        self.buffers.params.forget(slot)
        self.sampler.reset(slot, poison)
        self.grammars.reset(slot)
        self._watched[slot] = -1
        self._host.reset(slot, poison)
        self.prompts.asked.pop(slot, None)

    def ledger(self) -> dict[str, int]:
        held = {"positions": len(self._host.positions), "prompt_logprobs": len(self.prompts.asked)}
        return held | self.grammars.ledger() | self.accelerator.ledger()

    def measure_gaps(self, every: int) -> None:
        """Has the device's idle time measured behind one step in `every` (StepStats.gap_s)."""
        self.launcher.measure_gaps(every)

    def compute(self, work: Callable[[], T]) -> T:
        return work()  # this thread launches on the stream

    def routed_experts(self, slot: int, length: int) -> np.ndarray:
        buffers = self.buffers
        assert buffers.routed is not None
        return buffers.routed.read(buffers.slots.block_tables[buffers.routed.group, slot], length)

    def free_unused(self) -> None:
        self.accelerator.free_unused()

    # -- steps ------------------------------------------------------------------------------------------------------

    def steady_loop(self, scheduler: Scheduler, ring: OutputRing, wake_fd: int) -> SteadyLoop:
        """The GIL-free loop over this executor's plans and graphs."""
        return SteadyLoop(
            scheduler, self.plans, self.buffers.params, self.launcher, ring, self._special, self._watched, wake_fd
        )  # fmt: skip

    def adopt(self, plan: StepPlan) -> DeviceStep:
        """A plain step that the GIL-free loop launched, as Python settles it; the one before it has been waited for."""
        number, launcher = self.plans.index(plan), self.launcher
        step = DeviceStep(plan, RowArrays(plan), event=TokensHome(launcher, number), number=number, plain=True)
        step.event.asked = True
        step.launched_at = launcher.launched_at_of(number)
        step.started_at = max(step.launched_at, launcher.ended_at)
        self._newest = step
        return step

    def wait_until_read(self, plan: StepPlan) -> None:
        self.launcher.wait_until_read(self.plans.index(plan))

    def launch_forward(self, plan: StepPlan) -> StepResult:
        number = self.plans.index(plan)
        step = DeviceStep(plan, RowArrays(plan), event=TokensHome(self.launcher, number), number=number)
        self._newest = step
        try:
            self._launch_forward(step)
        except Exception as error:
            step.error = error
        return step

    def _launch_forward(self, step: DeviceStep) -> None:
        plan, rows, buffers = step.plan, step.rows, self.buffers
        if plan.num_encodes and self.encoder.advance(plan):
            step.plan_at = step.launched_at  # as below
        due = self.prompts.due(rows) if self.prompts.asked else None
        decodes = plan.num_decode_rows == plan.num_rows and not plan.num_media  # whose graphs read no media
        kind = GraphKind.DECODE if decodes else GraphKind.MIXED
        size = 0 if due is not None else self.launcher.pick(kind, plan.num_tokens)
        shown = bool(size and plan.num_media)
        media: list[tuple[int, int, torch.Tensor]] = []
        if shown:  # first: the device is at work on them while the record is completed
            step.plan_at = step.launched_at  # towers make its time a guess: what follows is planned at once
            media = self.encoder.take(step)
        self._take_lines(rows.slots)
        buffers.params.pack(plan)
        buffers.send_positions(plan, rows, self._host)
        if not shown:
            self._launch_sized(step, kind, size, due)
            return
        try:
            buffers.show(media)
            self._launch_sized(step, kind, size, due)
        finally:
            buffers.hide()

    def _take_lines(self, slots: np.ndarray) -> None:
        """Lines for rules of the step's slots. A slot that lost its line gets another here: its next step is Python's.
        Words that are sent again take the slot's newest token away from it, which the host knows by then: a slot takes
        a line with its first step, or after a step that did not name it.
        """
        staged, parked = self.sampler.take_lines(slots)
        for words in staged:
            slot = int(words[SlotWord.SLOT])
            self.buffers.params.stage(slot, words)
            self._special[slot] = self._how_special(slot)
        for slot in parked:
            self._special[slot] = SPECIAL_ALWAYS

    def _launch_sized(self, step: DeviceStep, kind: int, size: int, due: Due | None) -> None:
        """`size`: of the graph; 0 for none."""
        plan, rows, launcher = step.plan, step.rows, self.launcher
        sample_size = launcher.pick(GraphKind.SAMPLE, plan.num_sampled) if plan.num_sampled else 0
        step.plain = self.sampler.is_plain(rows.slots[rows.sampled])
        if step.plain and size and (sample_size or not plan.num_sampled):
            launcher.launch(plan, step.number, kind, size, sample_size)
            step.event.asked = True
            return
        launcher.prep(plan, step.number)
        if size:
            launcher.replay(kind, size)
        else:
            self._run_eagerly(step, kind, due)
        if step.plain:
            if sample_size:
                launcher.replay(GraphKind.SAMPLE, sample_size)
            elif plan.num_sampled:
                self.choose_into(plan.num_sampled)
            self._finish(step)

    def _run_eagerly(self, step: DeviceStep, kind: int, due: Due | None) -> None:
        plan, buffers = step.plan, self.buffers
        step.plan_at = step.launched_at  # as above, and so do launches
        media = self.encoder.take(step) if plan.num_media else []
        batch = buffers.batch(plan.num_tokens, plan.num_rows, kind == GraphKind.DECODE, media)
        if due is None:
            self._keep_sampled(batch, plan.num_sampled)
            return
        hidden = self.model.forward(batch)  # [num_tokens, hidden_size]
        self._gather_sampled(hidden, plan.num_sampled)
        vocab, raw = self.prompts.vocab, self.prompts.as_logits
        step.owed = due, prompt_logprobs(self.model.logits, hidden, due.asked, vocab, raw)

    def _finish(self, step: DeviceStep) -> None:
        """All of the step is launched."""
        self.launcher.finish()
        step.event.asked = True

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        assert isinstance(step, DeviceStep)
        if step.plain or step.error is not None:
            return
        try:
            slots = step.rows.slots[step.rows.sampled]
            size = self.launcher.pick(GraphKind.SAMPLE, len(slots)) if self.sampler.is_by_lines(slots) else 0
            logits = None if size else self.model.logits(self.buffers.sampled_hidden[: len(slots)])
            lines = self.grammars.fill(slots, self.upload.memory, self.sampler.allowed_of)
            if lines is not None:
                step.plan_at = step.launched_at  # masks take any time: what follows is planned at once
                self.upload.send(lines, [self.sampler.line(int(slots[place])) for place in lines.places])
            if logits is None:
                self.sampler.send_moved(slots)
                self.launcher.replay(GraphKind.SAMPLE, size)
            else:
                step.pending = self.sampler.launch_special(self.buffers.inputs, logits, self.buffers.tokens, slots)
                self.buffers.send_tokens()
            self._finish(step)
        except Exception as error:
            step.error = error

    def collect(self, step: StepResult) -> None:
        assert isinstance(step, DeviceStep)
        step.started_at = max(step.started_at, step.launched_at)
        if self._newest is not None and self._newest is not step:
            self._newest.started_at = step.event.fired_at  # the device goes on with it at once
            self._newest.began_before = step.event.found_done
        if step.error is not None:
            return
        step.gap_s = self.launcher.gap_s
        sampled = step.rows.sampled
        chosen = self.buffers.ring[step.number].numpy()[sampled]  # a copy: the ring is written again
        told = self.sampler.read(step.number, sampled, step.rows.slots[sampled])
        if step.pending is not None:
            told |= step.pending.collect()
        step.logprobs = {int(sampled[place]): entry for place, entry in told.items()}
        step.take_tokens(chosen, self.model.config.text.vocab_size)
        self.sampler.record(step.rows.slots[sampled], chosen[:, 0])
        if self.grammars.rows:
            self._advance(step)
        if step.owed is not None:
            due, pending = step.owed
            entries = pending.collect()
            due.tell(entries[number] for number in range(len(entries)))

    def _advance(self, step: DeviceStep) -> None:
        """Grammars take a step's tokens. Where one wakes behind whose token a plain step was launched, that step chose
        without the grammar: its choice for the slot is dropped and made again."""
        slots = [slot for slot in step.rows.slots[step.rows.sampled].tolist() if slot in self.grammars.rows]
        before = [self.grammars.rows[slot].waits_for for slot in slots]
        step.consume(self.grammars)
        behind = self._newest
        for slot, waited in zip(slots, before):
            if waited == self.grammars.rows[slot].waits_for:
                continue
            self._watch(slot)
            if behind is None or behind is step or not behind.plain or behind.error is not None:
                continue
            if waited and slot in behind.rows.slots[behind.rows.sampled]:
                self.grammars.rows[slot].redoes = True
                step.redone.append(slot)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a lost device has nothing left to wait for
            self.accelerator.close()
