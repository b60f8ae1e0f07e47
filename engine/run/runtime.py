"""Runtime: what the device thread owns after start: one loaded model, its scheduler, admission and executor.

Owner: device thread. Made by engine/run/start; after that every step goes through the executor.
"""

from __future__ import annotations

import secrets
from typing import Any

from _fast.scheduler import Scheduler
from _fast.states import ALIGN, ALL, NONE
from engine.base.config import EngineConfig
from engine.base.inbox import Inbox
from engine.base.limits import Limits
from engine.base.trace import Span
from engine.cache.layout import CacheLayout
from engine.device.profile import DeviceProfile
from engine.encoders.tower import each
from engine.models.base.model import Model
from engine.run.admission import Admission
from engine.run.steady import SteadySteps
from engine.step.parts.media import Media
from engine.step.plain import Executor
from engine.step.planted import planted
from engine.step.sizes import Sizes

BACKLOG = 256  # inputs that wait for a slot, as a multiple of the slots
PATCHES_PER_TOKEN = 4  # towers may take so many in a step for each token that it may have, of
CPU_ENCODE_TOKENS, DEVICE_ENCODE_TOKENS = 1024, 2048  # tokens at least


class Runtime:
    """Everything of one loaded model."""

    def __init__(self, config: EngineConfig, executor: Executor, sizes: Sizes, blocks: int) -> None:
        """`sizes`: with the context that the cache holds; `blocks`: of the cache, the dummy block among them."""
        executor.backend = planted(executor.backend, config.faults)
        rank = executor.backend.rank
        self.config, self.executor, self.sizes, self.layout = config, executor, sizes, rank.layout
        self.model: Model = rank.model
        self.model_config = rank.model.config
        self.limits = limits_of(config, rank.model, sizes, blocks)
        bidirectional = self.model_config.bidirectional
        patches = config.encoder_budget or PATCHES_PER_TOKEN * max(
            sizes.max_tokens, CPU_ENCODE_TOKENS if rank.on_host else DEVICE_ENCODE_TOKENS
        )
        # Of prompts that are computed as a whole, cached ones would lack the hidden states that are pooled.
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
            **state_settings(config, rank.layout),
        )
        self.admission = Admission(self.scheduler, executor, caches_prefixes, config.debug_poison)
        self._profile: DeviceProfile | None = None

    def steady(self, inbox: Inbox) -> SteadySteps | None:
        """The loop of steps that need no Python; it watches the inbox. None: every step is launched in Python."""
        if not self.executor.backend.can.steady_loop or self.config.faults is not None:  # which only Python's steps ask
            return None
        return SteadySteps(self.executor, self.scheduler, inbox.watch())

    @property
    def media(self) -> Media:
        """The part of media, which the steps of every model have."""
        part = self.executor.part(Media)
        assert part is not None
        return part

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
        self.media.encoder.drop_rows()
        return True

    def start_profile(self) -> bool:
        """Notes kernels and copies from now on; False: nothing runs on an accelerator."""
        if self.executor.backend.rank.on_host:
            return False
        self._profile = DeviceProfile()
        self._profile.start()
        return True

    def stop_profile(self) -> list[Span]:
        """What start_profile has noted."""
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.stop()


def state_settings(config: EngineConfig, layout: CacheLayout) -> dict[str, Any]:
    """Arguments of a scheduler about states; none where no layer has one."""
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


def limits_of(config: EngineConfig, model: Model, sizes: Sizes, blocks: int) -> Limits:
    """What requests are checked against on the loop; `blocks`: the dummy block among them."""
    prompt_rows = ("prompt",) if config.enable_prompt_embeds else ()
    found, text = model.config, model.config.text
    return Limits(
        max_model_len=sizes.max_model_len,
        num_blocks=blocks - 1,
        max_open=sizes.max_slots + (sizes.max_slots * BACKLOG if found.pooling else 0),
        max_rows=sizes.max_rows,
        vocab_size=text.vocab_size,
        num_embeddings=text.vocab_size,
        max_logprobs=config.max_logprobs,
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
        picture_bytes=max((tower.picture_bytes(sizes.encoder_rows) for tower in each(model.towers)), default=0),
    )
