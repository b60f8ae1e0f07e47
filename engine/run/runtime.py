"""Runtime: what the device thread owns after start: one loaded model, its scheduler, admission and executor.

Owner: device thread. `load_runtime` goes from a folder to a warm engine in phases whose seconds it writes down; after
it, every step goes through the executor's two launches.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from _fast import cpu
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.base.inbox import Inbox
from engine.base.limits import Limits
from engine.base.model_config import ModelConfig
from engine.base.request import Request, SamplingParams
from engine.base.trace import Span
from engine.cache.layout import CacheLayout
from engine.cache.routed import routed_bytes
from engine.cache.sizing import check_weights, fit_context, host_blocks
from engine.checkpoint.config import resolve_dtype
from engine.device.accelerator import Accelerator
from engine.device.host import choose_device, usable_cores
from engine.device.memory import enough_for
from engine.encoders.tower import each
from engine.kernels.gemm.pack import Placement
from engine.kernels.target import target
from engine.models.base.model import Model, check_prompt_rows
from engine.models.registry import build_model, load_model_config
from engine.quant.forms import form_line
from engine.quant.kv import stored_specs
from engine.quant.online import requested
from engine.run.admission import Admission
from engine.run.summary import summary
from engine.step.cpu_executor import CpuExecutor
from engine.step.executor import Executor, Sizes
from engine.step.pooling_cpu import CpuPoolingExecutor
from engine.weights.files import Shard, open_checkpoint
from engine.weights.load import load_weights, weight_bytes
from engine.weights.progress import ProgressLine

if TYPE_CHECKING:
    from engine.device.profile import DeviceProfile
    from engine.run.steady import SteadySteps

log = logging.getLogger("omniloop.engine")

CPU_ROWS, CPU_TOKENS = 64, 512  # defaults of max_num_seqs and max_num_batched_tokens on a CPU
DEVICE_ROWS, DEVICE_TOKENS = 256, 2048  # and on an accelerator
PATCHES_PER_TOKEN = 4  # towers may take so many in a step for each token that it may have; on a CPU of
CPU_ENCODE_TOKENS = 1024  # tokens at least, on an accelerator of DEVICE_TOKENS
POOLING_ROWS, POOLING_TOKENS = 1024, 16384  # on an accelerator, of a model that pools: short texts fill a step
CPU_POOLING_ROWS, CPU_POOLING_TOKENS = 256, 4096
BACKLOG = 256  # inputs that wait for a slot, as a multiple of the slots
Phase = Callable[[str], AbstractContextManager[None]]


class Runtime:
    """Everything of one loaded model."""

    def __init__(
        self, config: EngineConfig, model: Model, executor: Executor, sizes: Sizes, layout: CacheLayout, blocks: int
    ) -> None:
        model_config = model.config
        prompt_rows = ("prompt",) if config.enable_prompt_embeds else ()
        self.config, self.model_config, self.model, self.executor = config, model_config, model, executor
        self.sizes, self.layout, ahead = sizes, layout, model_config.ahead
        self.limits = Limits(
            max_model_len=sizes.max_model_len,
            num_blocks=blocks - 1,
            max_open=sizes.max_slots + (sizes.max_slots * BACKLOG if model_config.pooling else 0),
            vocab_size=model_config.text.vocab_size,
            num_embeddings=model_config.text.vocab_size,
            max_logprobs=config.max_logprobs,
            encoder_capacity=sizes.encoder_rows,
            pooled_width=model.pooler.width(model_config.text.hidden_size) if model.pooler else 0,
            pools=model_config.pooling is not None,
            ahead=ahead,
            max_joint=min(sizes.max_chunk, sizes.max_tokens - sizes.max_rows + 1),
            modalities=(*(name for name in model_config.modalities if name != "text"), *prompt_rows),
            hidden_size=model_config.text.hidden_size,
            row_widths={modality: tower.row_width for modality, tower in model.towers.items()},
            routed_experts=config.return_routed_experts,
            has_experts=bool(model_config.text.routings),
            axes=model_config.axes,
            adds_media=model_config.adds_media,
            picture_bytes=max((tower.picture_bytes(sizes.encoder_rows) for tower in each(model.towers)), default=0),
        )
        least = CPU_ENCODE_TOKENS if model.device == "cpu" else DEVICE_TOKENS
        patches = config.encoder_budget or PATCHES_PER_TOKEN * max(sizes.max_tokens, least)
        # Of prompts that are computed as a whole, cached ones would lack the hidden states that are pooled.
        caches_prefixes = config.enable_prefix_caching and not sizes.whole_prompts
        self.scheduler = Scheduler(
            max_slots=sizes.max_slots,
            max_rows=sizes.max_rows,
            max_tokens=sizes.max_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=blocks,
            block_size=sizes.block_size,
            groups=layout.tables,
            prefix_caching=caches_prefixes,
            hash_key=secrets.token_bytes(16),
            policy=int(config.scheduling_policy == "priority"),
            max_chunk=sizes.max_chunk,
            # One step encodes all media of a prompt that one step computes.
            encoder_budget=0 if ahead == "prompt" else patches,
            encoder_capacity=sizes.encoder_rows,
            whole_prompts=sizes.whole_prompts,
        )
        self._profile: DeviceProfile | None = None
        window = min((layer.window for layer in model_config.text.layers if layer.window), default=0)
        self.admission = Admission(
            self.scheduler, executor, caches_prefixes, config.debug_poison, ahead, window, model.adapters,
            model_config.adds_media,
        )  # fmt: skip

    @property
    def next_plan(self) -> StepPlan:
        """The one that the next step is written into: they take turns by step number."""
        return self.executor.plans[self.scheduler.next_step % len(self.executor.plans)]

    def steady(self, inbox: Inbox) -> SteadySteps | None:
        """The loop of steps that need no Python; it watches the inbox. None: the executor launches in Python only."""
        if not self.executor.has_steady_loop:
            return None
        from engine.run.steady import SteadySteps
        from engine.step.device_executor import DeviceExecutor

        assert isinstance(self.executor, DeviceExecutor)
        return SteadySteps(self.executor, self.scheduler, inbox.watch())

    @property
    def has_work(self) -> bool:
        """True while a request runs or waits."""
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    @property
    def fills_a_step(self) -> bool:
        """True while prompts lack as many tokens as a step can have."""
        return self.scheduler.shares.load()[2] >= self.sizes.max_tokens

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing is forgotten, while a request holds blocks."""
        if self.has_work or self.scheduler.pool.num_used:
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def reset_encoder_cache(self) -> bool:
        """Drops what the towers made; they run again for media seen before. False while a request is open."""
        if self.has_work:
            return False
        self.executor.encoder.drop_rows()
        return True

    def start_profile(self) -> bool:
        """Notes kernels and copies from now on; False: nothing runs on an accelerator."""
        if str(self.model.device) == "cpu":
            return False
        from engine.device.profile import DeviceProfile

        self._profile = DeviceProfile()
        self._profile.start()
        return True

    def stop_profile(self) -> list[Span]:
        """What start_profile has noted."""
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.stop()


def load_runtime(config: EngineConfig, startup: dict[str, float]) -> Runtime:
    """Folder to warm engine; runs on the device thread. Raises ConfigError with one line for the operator."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        startup[name] = time.perf_counter() - begun

    device = choose_device(config.device)
    # All heavy work on a CPU goes through our own kernels' threads; torch's would only fight them for the cores.
    torch.set_num_threads(1)
    cpu.set_num_threads(config.num_threads or usable_cores())
    with phase("config"):
        model_config = load_model_config(
            config.model, config.hf_overrides, config.without_media, config.model_impl, config.runner, config.pooler
        )
        model_config = requested(model_config, config.quantization)
        dtype = resolve_dtype(model_config, config.dtype, device)
        sizes = sizes_of(config, model_config, device)
        model_config = replace(model_config, max_model_len=sizes.max_model_len)
        if model_config.implementation != "native":
            _tell_transformers(config, model_config, device)
    with phase("device"):
        accelerator = open_accelerator(device)
    with phase("weights"), torch.inference_mode():
        has_codes = model_config.raw.get("quantization_config") is not None or config.kv_cache_dtype != "auto"
        shards = open_checkpoint(config.model) if has_codes and config.load_format != "dummy" else None
        model = build_model(model_config, dtype, device, shards)
        check_prompt_rows(config.enable_prompt_embeds, model)
        if line := form_line(model, None if accelerator is None else target()):
            log.info("%s", line)
        layout = layout_of(config, model, sizes, shards)
        read_weights(config, model, accelerator)
    if accelerator is None:
        runtime = _on_host(config, model, sizes, layout, phase)
    else:
        runtime = _on_device(config, model, sizes, layout, accelerator, phase)
    room = enough_for("warmup", accelerator.memory) if accelerator is not None else nullcontext()
    with phase("warmup"), room:
        warm_up(runtime)
    for line in summary(config, model, runtime.sizes, runtime.layout, runtime.limits.num_blocks):
        log.info("start: %s", line)
    log.debug("start-up: %s", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in startup.items()))
    return runtime


def _tell_transformers(config: EngineConfig, model: ModelConfig, device: str) -> None:
    """One line, and what that way does not give."""
    if config.deterministic and device != "cpu":
        raise ConfigError(
            f"--deterministic: {model.architecture} runs through transformers, whose products on an accelerator depend "
            "on what else is in the batch; leave the flag out, or use --device cpu"
        )
    torch.set_num_threads(config.num_threads or usable_cores())  # here products are torch's
    what = (
        "module runs in our steps" if model.implementation == "transformers" else "towers run before a decoder of ours"
    )
    log.info("%s has no file here: transformers' %s", model.architecture, what)


def read_weights(config: EngineConfig, model: Model, accelerator: Accelerator | None) -> None:
    """Fills the model; an accelerator is asked first whether it has the room."""
    line = ProgressLine()
    if accelerator is None:
        load_weights(model, config.model, config.load_format, None, config.seed, line)
        _read_pooler(config, model, Placement(model.dtype, model.device))
        return
    check_weights(config, weight_bytes(model), accelerator.memory(), model.dtype)
    with enough_for("weights", accelerator.memory):
        placement = Placement(
            model.dtype, model.device, config.deterministic, accelerator.algorithms, accelerator.scaled,
            accelerator.long,
        )  # fmt: skip
        load_weights(model, config.model, config.load_format, placement, config.seed, line)
        _read_pooler(config, model, placement)


def _read_pooler(config: EngineConfig, model: Model, placement: Placement) -> None:
    if model.pooler is not None:
        model.pooler.read_folders(config.model, config.load_format, placement, config.seed)


def layout_of(
    config: EngineConfig, model: Model, sizes: Sizes, shards: list[Shard] | None, read: bool = True
) -> CacheLayout:
    """Where keys and values lie, and in which numbers; arguments as of stored_specs."""
    specs = stored_specs(model, config.kv_cache_dtype, config.kv_cache_skip_layers, shards, read)
    beside = routed_bytes(model.config.text, specs) if config.return_routed_experts and model.pooler is None else 0
    return CacheLayout(specs, sizes.block_size, beside)


def _on_host(config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, phase: Phase) -> Runtime:
    with phase("cache"):
        longest = layout.blocks_for(sizes.max_model_len, sizes.max_chunk)
        blocks = host_blocks(config, layout, longest, sizes.max_rows)
        context = fit_context(config, layout, sizes.max_model_len, sizes.max_chunk, blocks)
        sizes = replace(sizes, max_model_len=context)
        caches = layout.allocate(blocks, config.debug_poison)
    kind = CpuExecutor if model.pooler is None else CpuPoolingExecutor
    executor = kind(config, model, sizes, layout, caches)
    if executor.routed is not None:
        executor.routed.allocate(blocks)
    return Runtime(config, model, executor, sizes, layout, blocks)


def open_accelerator(device: str) -> Accelerator | None:
    """The accelerator, bound to the calling thread; None on a CPU."""
    return None if device == "cpu" else Accelerator(device)


def _on_device(
    config: EngineConfig, model: Model, sizes: Sizes, layout: CacheLayout, accelerator: Accelerator, phase: Phase
) -> Runtime:

    from engine.step.device_executor import DeviceExecutor
    from engine.step.pooling_device import DevicePoolingExecutor, PoolingStartup
    from engine.step.startup import Startup

    memory = accelerator.memory
    with phase("buffers"), enough_for("buffers", memory):
        executor: DeviceExecutor | DevicePoolingExecutor
        if model.pooler is None:
            executor = DeviceExecutor(config, model, sizes, layout, accelerator)
            start = Startup(executor)
        else:
            executor = DevicePoolingExecutor(config, model, sizes, layout, accelerator)
            start = PoolingStartup(executor)
    with phase("kernels"), enough_for("profiling", memory):
        start.compile(usable_cores())
    with phase("profile"), enough_for("profiling", memory):
        blocks = start.profile()
        context = fit_context(config, layout, sizes.max_model_len, sizes.max_chunk, blocks)
        sizes = replace(sizes, max_model_len=context)
    with phase("cache"), enough_for("cache", memory):
        start.allocate(blocks)
    with phase("graphs"), enough_for("graphs", memory):
        start.capture()
    return Runtime(config, model, executor, sizes, layout, blocks)


def warm_up(runtime: Runtime) -> None:
    """One prompt and two decode steps through the real path: the first request meets nothing for the first time."""
    scheduler, executor = runtime.scheduler, runtime.executor
    prompt = np.zeros(max(1, min(32, runtime.limits.max_model_len - 3)), np.int32)
    request = Request(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    empty = np.zeros(0, np.int32)
    slot = scheduler.add(
        0, prompt, max_tokens=2, min_tokens=0, ignore_eos=True, eos_ids=empty, stop_ids=empty, priority=0, arrival=0.0,
        root=bytes(16), read_cache=False,
    )  # fmt: skip
    executor.admit(slot, request, 0, None)
    while scheduler.schedule(plan := runtime.next_plan):
        step = executor.launch_forward(plan)
        executor.launch_sample(step, lambda _: None)
        if not step.event.wait(runtime.config.step_timeout * 10):
            raise ConfigError("the warm-up step did not end; is the machine out of memory?")
        if step.error is not None:
            raise step.error
        executor.collect(step)
        assert step.tokens is not None
        scheduler.commit(plan, step.tokens.reshape(-1))
    scheduler.reset_prefix_cache()
    executor.reset(slot, poison=False)


def check_lead(config: EngineConfig, lead: int, host: bool) -> None:
    """Refuses what a model whose prompts begin with sound cannot be served with."""
    if lead % config.block_size:
        raise ConfigError(f"--block-size {config.block_size}: this model's {lead} rows of sound need 16 or 32")
    if 0 < config.max_model_len <= lead:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the sound of a prompt takes {lead} tokens; ask for more, or "
            "leave it out"
        )
    if config.deterministic and not host:
        raise ConfigError("--deterministic: not for this model, whose attention is cut as the whole step suggests")


def sizes_of(config: EngineConfig, model_config: ModelConfig, device: str) -> Sizes:
    """Rows and tokens of a step, as flags say or the device suggests."""
    host, pooling = device == "cpu", model_config.pooling
    usual = (CPU_ROWS, CPU_TOKENS) if host else (DEVICE_ROWS, DEVICE_TOKENS)
    if pooling is not None:
        usual = (CPU_POOLING_ROWS, CPU_POOLING_TOKENS) if host else (POOLING_ROWS, POOLING_TOKENS)
    rows, tokens = config.max_num_seqs or usual[0], config.max_num_batched_tokens or usual[1]
    held = model_config.max_position
    if config.max_model_len > held:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: this checkpoint holds {held}; ask for at most {held}"
        )
    if model_config.lead:
        check_lead(config, model_config.lead, host)
    asked = config.max_model_len or held
    if pooling is not None:
        asked = config.max_model_len or min(held, pooling.max_tokens or held)
    if asked < 2:
        raise ConfigError(f"--max-model-len {asked}: a prompt and its answer need at least 2 tokens")
    whole = pooling is not None and pooling.whole
    together = model_config.ahead == "prompt"  # beside it all other rows may decode
    tokens = max(tokens, rows, asked if whole else 0, asked + rows - 1 if together else 0)
    beyond = [size for size in config.cudagraph_capture_sizes if not 1 <= size <= rows]
    if beyond:
        raise ConfigError(
            f"--cudagraph-capture-sizes {beyond[0]}: a step has 1 to {rows} rows here; leave it out, or raise "
            "--max-num-seqs"
        )
    return Sizes(
        max_rows=rows,
        max_tokens=tokens,
        max_slots=rows + config.max_num_queued_reqs,
        max_model_len=asked,
        max_chunk=tokens if whole or together else min(config.max_prefill_chunk or tokens, tokens),
        block_size=asked if pooling is not None and pooling.bidirectional else config.block_size,
        whole_prompts=whole,
        encoder_rows=config.encoder_cache_tokens or max(4 * tokens, 16384),
    )
