"""Runtime: one loaded model with its scheduler, admission and executor; the device thread owns it after start.

Owner: device thread. engine/run/start makes the Runtime; after that the executor runs every step.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from _fast.scheduler import Scheduler
from _fast.states import ALIGN, ALL, NONE
from engine.base.config import EngineConfig
from engine.base.inbox import Inbox
from engine.base.limits import Limits, RankMemory, idle_slots
from engine.base.trace import RANKS, Span
from engine.cache.layout import CacheLayout
from engine.device.profile import DeviceProfile
from engine.encoders.tower import each
from engine.models.base.model import Model
from engine.parallel.model import SplitModel
from engine.run.admission import Admission
from engine.run.rank_memory import memory_of_ranks
from engine.run.steady import SteadySteps
from engine.step.parts.media import Media
from engine.step.parts.order import claims_of
from engine.step.plain import Executor
from engine.step.planted import planted
from engine.step.sizes import Sizes
from engine.step.times import Times

BACKLOG = 256  # pooling models: for each slot, so many more inputs may wait outside the scheduler
PATCHES_PER_TOKEN = 4  # patches that towers may encode in a step, per token of the step's budget
CPU_ENCODE_TOKENS, DEVICE_ENCODE_TOKENS = 1024, 2048  # the patches are computed from at least so many tokens


class Runtime:
    """One loaded model with its scheduler, admission and executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        sizes: Sizes,
        blocks: int,
        measured: Callable[[], Times] | None = None,
    ) -> None:
        """`sizes`: max_model_len already fits into the cache; `blocks`: blocks of the cache with the dummy block;
        `measured`: measures the times of an accelerator's steps."""
        executor.backend = planted(executor.backend, config.faults)
        rank = executor.backend.rank
        self.config, self.executor, self.sizes, self.layout = config, executor, sizes, rank.layout
        self.model: Model = rank.model
        self.model_config = rank.model.config
        of_ranks = memory_of_ranks(rank.model, rank.layout, blocks, claims_of(executor.parts).weight_bytes)
        self.limits = limits_of(config, rank.model, sizes, blocks, of_ranks)
        bidirectional = self.model_config.bidirectional
        patches = config.encoder_budget or PATCHES_PER_TOKEN * max(
            sizes.max_tokens, CPU_ENCODE_TOKENS if rank.on_host else DEVICE_ENCODE_TOKENS
        )
        # Pooling a whole prompt needs the hidden states of all its tokens; cached prefixes would lack them.
        caches_prefixes = config.enable_prefix_caching and not sizes.whole_prompts
        self.scheduler = Scheduler(
            max_slots=sizes.max_slots,
            max_rows=sizes.max_rows,
            max_tokens=sizes.max_tokens,
            max_model_len=sizes.max_model_len,
            num_blocks=blocks,
            block_size=sizes.block_size,
            groups=rank.layout.tables,
            prefix_caching=caches_prefixes,
            hash_key=secrets.token_bytes(16),
            policy=int(config.scheduling_policy == "priority"),
            max_chunk=sizes.max_chunk,
            # One step encodes all media of a prompt that one step computes.
            encoder_budget=0 if bidirectional == "prompt" else patches,
            encoder_capacity=sizes.encoder_rows,
            whole_prompts=sizes.whole_prompts,
            max_lines=sizes.max_lines,
            **state_settings(config, rank.layout),
        )
        self.admission = Admission(self.scheduler, executor, caches_prefixes, config.debug_poison)
        self.measured = measured
        self._profile: DeviceProfile | None = None

    def steady(self, inbox: Inbox) -> SteadySteps | None:
        """The GIL-free loop of steps; it watches the inbox. None: Python launches every step."""
        # Only steps that Python launches check the points of `faults`.
        if not self.executor.backend.can.steady_loop or self.config.faults is not None:
            return None
        return SteadySteps(self.executor, self.scheduler, inbox.watch(), self.config.report_drafts)

    @property
    def media(self) -> Media:
        """The media part of the step; every model has this part."""
        part = self.executor.part(Media)
        assert part is not None
        return part

    @property
    def has_work(self) -> bool:
        """True while a request runs or waits."""
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    @property
    def fills_a_step(self) -> bool:
        """True while prompts have at least as many uncomputed tokens as a step can take."""
        return self.scheduler.shares.load()[2] >= self.sizes.max_tokens

    def reset_prefix_cache(self) -> bool:
        """Drops every cached prefix and returns True. While a request holds blocks: drops nothing, returns False."""
        if self.has_work or self.scheduler.pool.num_used:
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def reset_encoder_cache(self) -> bool:
        """Drops all cached tower outputs, so towers run again for known media. False while a request is open."""
        if self.has_work:
            return False
        self.media.encoder.drop_rows()
        return True

    def start_profile(self) -> bool:
        """Starts recording kernels and copies of accelerators, and the work of ranks. False: there are neither."""
        group = self.model.group if isinstance(self.model, SplitModel) else None
        if group is not None:
            group.record_spans()
        if not self.executor.backend.rank.on_host:
            self._profile = DeviceProfile([rank.device for rank in self.executor.ranks])
            self._profile.start()
        return group is not None or self._profile is not None

    def stop_profile(self) -> list[Span]:
        """Ends the recording and returns the spans of kernels and copies, and of ranks."""
        profile, self._profile = self._profile, None
        found = [] if profile is None else profile.stop()
        if isinstance(self.model, SplitModel) and self.model.group.spans is not None:
            found += [Span(RANKS + rank, "work", begun, end, {}) for rank, begun, end in self.model.group.spans]
            self.model.group.spans = None
        return found


def state_settings(config: EngineConfig, layout: CacheLayout) -> dict[str, Any]:
    """The Scheduler's arguments about recurrent states; empty if no layer has a state."""
    runs, states = layout.runs, config.states
    if runs is None:
        return {}
    return {
        "state_blocks": runs.state_blocks,
        "tail_blocks": runs.tail_blocks,
        "state_mode": {"none": NONE, "align": ALIGN, "all": ALL}[states.mode],
        "state_every": states.every,
        "state_share": states.share,
    }


def limits_of(
    config: EngineConfig, model: Model, sizes: Sizes, blocks: int, of_ranks: tuple[RankMemory, ...]
) -> Limits:
    """Limits against which the event loop checks requests; `blocks`: blocks of the cache with the dummy block."""
    prompt_rows = ("prompt",) if config.enable_prompt_embeds else ()
    found, text = model.config, model.config.text
    most = sizes.max_slots - idle_slots(sizes.max_rows)
    return Limits(
        max_model_len=sizes.max_model_len,
        num_blocks=blocks - 1,
        max_open=most + (most * BACKLOG if found.pooling else 0),
        max_rows=sizes.max_rows,
        vocab_size=text.vocab_size,
        num_embeddings=text.vocab_size,
        max_logprobs=config.max_logprobs,
        num_drafts=sizes.num_drafts,
        encoder_capacity=sizes.encoder_rows,
        pooled_width=model.pooler.width(text.hidden_size) if model.pooler else 0,
        pools=found.pooling is not None,
        bidirectional=found.bidirectional,
        max_bi_span=min(sizes.max_chunk, sizes.max_tokens - sizes.max_rows + 1),
        modalities=(*(name for name in found.modalities if name != "text"), *prompt_rows),
        hidden_size=text.hidden_size,
        row_widths={modality: tower.row_width for modality, tower in model.towers.items()},
        routed_experts=config.return_routed_experts,
        has_experts=bool(text.routings),
        axes=found.axes,
        adds_media=found.adds_media,
        adapters=model.adapters,
        of_ranks=of_ranks,
        picture_bytes=max((tower.picture_bytes(sizes.encoder_rows) for tower in each(model.towers)), default=0),
    )
