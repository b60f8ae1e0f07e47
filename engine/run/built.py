"""Builds the model of a start, without weights, on one rank or on several.

Thread: device. In: the settings and the checkpoint's configuration. Out: a Model; ConfigError in one line for settings
that the model does not support.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from engine.base.config import EngineConfig
from engine.base.model_config import ModelConfig
from engine.device.accelerator import Accelerator
from engine.device.cards import cards_of, detour_line, ranks_line
from engine.kernels.parallel.tokens import words_of
from engine.kernels.target import target
from engine.models.base.model import Model, check_prompt_rows
from engine.models.registry import build_model
from engine.parallel.device import DeviceGroup, Needs, room_bytes
from engine.parallel.group import Group
from engine.parallel.mixers import exchanged
from engine.parallel.model import SplitModel
from engine.parallel.slices import check_dealt, check_experts
from engine.quant.forms import form_line
from engine.step.sizes import Sizes
from engine.weights.files import Shard

log = logging.getLogger("omniloop.engine")


def built(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    shards: Sequence[Shard] | None,
    sizes: Sizes,
    accelerators: Sequence[Accelerator],
) -> Model:
    """The model; `shards`: the headers of its files, if they decide about its layers; `accelerators`: of the ranks."""
    build = functools.partial(build_model, dtype=dtype, device=device, shards=shards)
    ranks = config.tensor_parallel
    check_experts(model_config, config)
    if ranks == 1 and config.ranks.whole_experts:
        log.info("--enable-expert-parallel has no effect: one rank has all experts")
    if ranks > 1:
        check_dealt(model_config, config)
        if not accelerators:
            log.info("%d ranks are simulated on the CPU, for tests: they share its cores", ranks)
    whole = build(model_config)
    check_prompt_rows(config.enable_prompt_embeds, whole)
    if line := form_line(whole, None if device == "cpu" else target()):
        log.info("%s", line)
    if ranks == 1:
        return whole

    def slice_of(sliced: ModelConfig, rank: int) -> Model:
        return build(sliced, device=str(accelerators[rank].device) if accelerators else device)

    group = group_of(accelerators, needs_of(model_config, sizes, dtype, ranks))
    return SplitModel(whole, slice_of, ranks, group, config.ranks.whole_experts)


def needs_of(config: ModelConfig, sizes: Sizes, dtype: torch.dtype, ranks: int) -> Needs:
    """What so many ranks exchange."""
    text = config.text
    kinds = [(dtype, text.hidden_size)]
    if text.qk_norm == "projection":  # sums of squares of queries and of keys; also sums, for LayerNorms
        kinds.append((torch.float32, 4 if text.layer_norm else 2))
    kinds += [kind for layer in text.layers for kind in exchanged(layer.mixer, ranks, dtype)]
    words, lines = sizes.max_rows * words_of(sizes.num_drafts), sizes.max_lines
    if config.pooling is not None:
        words = lines = 1  # no token is chosen
    return Needs(tuple(dict.fromkeys(kinds)), sizes.max_tokens, words, lines, text.vocab_size, dtype)


def group_of(accelerators: Sequence[Accelerator], needs: Needs) -> Group | None:
    """The group of ranks on devices; None: the ranks share a CPU."""
    if not accelerators or accelerators[0].device.type != "cuda":
        return None
    cards = cards_of(len(accelerators))
    group = DeviceGroup(accelerators, needs, mapped=any(card.unreached for card in cards))
    if line := detour_line(cards):
        log.warning("%s", line)
    log.info("%s", ranks_line(group.devices, room_bytes(group.ranks, needs)))
    return group
