"""Runtime: what the device thread owns after start, and the two launches of a step.

Owner: device thread. `load_runtime` goes from a folder to a warm engine in phases whose seconds it writes down;
`launch_forward` and `launch_sample` put a step's two halves on the stream.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from _fast import cpu
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from engine.admission import Admission
from engine.cache.pool import allocate, count_blocks, group_of
from engine.config import EngineConfig
from engine.device import HostStream, choose_device, usable_cores
from engine.errors import ConfigError
from engine.limits import Limits
from engine.models.base import Model
from engine.models.hf import ModelConfig, load_model_config, resolve_dtype
from engine.models.registry import build_model
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler
from engine.step.build import RowArrays, apply_updates, build
from engine.step.encode import EncoderCache
from engine.step.result import StepResult
from engine.step.slots import SlotState
from engine.weights.load import load_weights

log = logging.getLogger("omniloop.engine")

CPU_ROWS, CPU_TOKENS = 64, 512  # defaults of max_num_seqs and max_num_batched_tokens on a CPU


class Runtime:
    """Everything of one loaded model."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, model: Model, dtype: torch.dtype) -> None:
        specs = model.cache_specs()
        rows = config.max_num_seqs or CPU_ROWS
        tokens = max(config.max_num_batched_tokens or CPU_TOKENS, rows)
        max_len = _max_model_len(config, model_config)
        blocks = count_blocks(config, specs, dtype, max_len, rows)
        if (blocks - 1) * config.block_size < max_len:
            max_len = _shorten(config, max_len, (blocks - 1) * config.block_size)
        max_slots = rows + config.max_num_queued_reqs
        capacity = config.encoder_cache_tokens or max(4 * tokens, 16384)
        self.config, self.model_config, self.model = config, model_config, model
        self.mrope = model_config.mrope
        self.limits = Limits(
            max_model_len=max_len,
            num_blocks=blocks - 1,
            max_open=max_slots,
            vocab_size=model_config.text.vocab_size,
            num_embeddings=model_config.text.vocab_size,
            max_logprobs=config.max_logprobs,
            encoder_capacity=capacity,
            modalities=tuple(name for name in model_config.modalities if name != "text"),
        )
        self.scheduler = Scheduler(
            max_slots=max_slots,
            max_rows=rows,
            max_tokens=tokens,
            max_model_len=max_len,
            num_blocks=blocks,
            block_size=config.block_size,
            groups=[group_of(specs)],
            prefix_caching=config.enable_prefix_caching,
            hash_key=secrets.token_bytes(16),
            policy=int(config.scheduling_policy == "priority"),
            max_chunk=config.max_prefill_chunk,
            encoder_budget=config.encoder_budget or max(tokens, 1024),
            encoder_capacity=capacity,
        )
        longest = -(-max_len // config.block_size)
        # A plan is written while the step before it runs, never while its own last step does: two are enough.
        self.plans = [StepPlan(rows, tokens, rows * (longest + 1)) for _ in range(2)]
        self.next_plan = 0
        self.slots = SlotState(max_slots, longest)
        self.sampler = Sampler(max_slots, model_config.text.vocab_size, config.logprobs_mode)
        self._as_logits = config.logprobs_mode.endswith("_logits")
        self.encoder = EncoderCache(model)
        self.admission = Admission(
            self.scheduler, self.slots, self.sampler, self.encoder, config.enable_prefix_caching, config.debug_poison
        )
        self.caches = allocate(specs, blocks, config.block_size, dtype, config.debug_poison)
        self.stream = HostStream()

    @property
    def has_work(self) -> bool:
        """True while a request runs or waits."""
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing is forgotten, while a request holds blocks."""
        if self.has_work or self.scheduler.used_blocks:
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def reset_encoder_cache(self) -> bool:
        """Drops what the towers made; they run again for media seen before. False while a request is open."""
        if self.has_work:
            return False
        self.encoder.drop_rows()
        return True

    # -- the two halves of a step -----------------------------------------------------------------------------------

    def launch_forward(self, plan: StepPlan) -> StepResult:
        """Puts towers and forward of a planned step on the stream."""
        step = StepResult(plan, RowArrays(plan))
        self.stream.launch(self._forward, step)
        return step

    def launch_sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        """Puts the choice of tokens on the stream; `done` is called there when they can be read."""
        self.stream.launch(self._sample, step, done)

    def _forward(self, step: StepResult) -> None:
        step.started_at = time.perf_counter()
        try:
            apply_updates(step.plan, self.slots)
            media = self._media(step)
            batch = build(step.plan, step.rows, self.slots, self.config.block_size, media, self.caches, self.mrope)
            hidden = self.model.forward(batch)  # [num_tokens, hidden]
            self._prompt_logprobs(step, hidden)
            if len(step.rows.sampled):
                step.logits = self.model.logits(hidden[batch.sample_index])  # [num_sampled, vocab] float32
        except Exception as error:
            step.error = error

    def _sample(self, step: StepResult, done: Callable[[StepResult], None]) -> None:
        try:
            tokens = np.full(step.plan.num_rows, -1, np.int32)
            if step.error is None and step.logits is not None:
                rows = step.rows.sampled
                slots = step.rows.slots[rows]
                index = step.rows.computed[rows] + step.rows.lens[rows] - self.slots.prompt_len[slots]
                chosen, logprobs = self.sampler.sample(step.logits, slots, index)
                step.invalid += rows[chosen < 0].tolist()
                step.logprobs = {int(rows[k]): entry for k, entry in logprobs.items()}
                tokens[rows] = chosen
                tokens[step.invalid] = -1
                self.slots.last_token[slots] = np.maximum(chosen, 0)
            step.tokens, step.logits = tokens, None
        except Exception as error:
            step.error = error
        step.event.fire()
        done(step)

    def _media(self, step: StepResult) -> list[tuple[int, int, torch.Tensor]]:
        """Tower rows that this step's tokens take; a row whose tower failed ends alone."""
        plan, found = step.plan, []
        for run in range(plan.num_media):
            start, length = int(plan.media_start[run]), int(plan.media_length[run])
            rows = self.encoder.rows(int(plan.media_entry[run]), int(plan.media_row[run]), length)
            if rows is None:
                step.invalid.append(int(np.searchsorted(step.rows.starts, start, side="right")) - 1)
            else:
                found.append((start, length, rows))
        return found

    def _prompt_logprobs(self, step: StepResult, hidden: torch.Tensor) -> None:
        for row, slot in enumerate(step.rows.slots.tolist()):
            live = self.admission.rows.get(slot)
            if live is None or live.prompt_logprobs is None:
                continue
            prompt, done = live.request.prompt_token_ids, int(step.rows.computed[row])
            count = min(int(step.rows.lens[row]), len(prompt) - 1 - done)
            if count > 0:
                start = int(step.rows.starts[row])
                del live.prompt_logprobs[done + 1 :]  # a preempted prompt is computed again
                asked = live.request.sampling.prompt_logprobs or 0
                following = prompt[done + 1 : done + 1 + count]
                live.prompt_logprobs += prompt_logprobs(
                    self.model.logits, hidden[start : start + count], following, asked, self._as_logits
                )


def load_runtime(config: EngineConfig, startup: dict[str, float]) -> Runtime:
    """Folder to warm engine; runs on the device thread. Raises ConfigError with one line for the operator."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        startup[name] = time.perf_counter() - begun

    device = choose_device(config.device)
    threads = config.num_threads or usable_cores()
    # All heavy work goes through our own kernels' threads; torch's would only fight them for the cores.
    torch.set_num_threads(1)
    cpu.set_num_threads(threads)
    with phase("config"):
        model_config = load_model_config(config.model)
        dtype = resolve_dtype(model_config, config.dtype, device)
    with phase("weights"), torch.inference_mode():
        model = build_model(model_config, dtype, device)
        load_weights(model, config.model, config.load_format, device=device, dtype=dtype, seed=config.seed)
    with phase("cache"):
        runtime = Runtime(config, model_config, model, dtype)
    with phase("warmup"):
        warm_up(runtime)
    log.debug("start-up: %s", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in startup.items()))
    return runtime


def warm_up(runtime: Runtime) -> None:
    """One prompt and two decode steps through the real path: the first request meets nothing for the first time."""
    scheduler = runtime.scheduler
    prompt = np.zeros(min(32, runtime.limits.max_model_len - 3), np.int32)
    empty = np.zeros(0, np.int32)
    slot = scheduler.add(
        0, prompt, max_tokens=2, min_tokens=0, ignore_eos=True, eos_ids=empty, stop_ids=empty, priority=0, arrival=0.0,
        root=bytes(16), read_cache=False,
    )  # fmt: skip
    runtime.slots.prompt_len[slot] = len(prompt)
    plan = runtime.plans[0]
    while scheduler.schedule(plan):
        step = runtime.launch_forward(plan)
        runtime.launch_sample(step, lambda _: None)
        if not step.event.wait(runtime.config.step_timeout * 10):
            raise ConfigError("the warm-up step did not end; is the machine out of memory?")
        if step.error is not None:
            raise step.error
        scheduler.commit(plan, step.tokens)
    scheduler.reset_prefix_cache()
    runtime.slots.reset(slot)


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    held = model_config.max_position
    if config.max_model_len > held:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: this checkpoint holds {held}; ask for at most {held}"
        )
    return config.max_model_len or held


def _shorten(config: EngineConfig, wanted: int, fits: int) -> int:
    """The context that the KV cache can hold; an explicit wish that does not fit is refused."""
    if config.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted}: the KV cache holds {fits} tokens; ask for at most {fits}, "
            "or raise --kv-cache-memory-bytes"
        )
    log.warning("context limited to %d of %d tokens by the KV cache's memory", fits, wanted)
    return fits
