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
from engine.kernels.target import target
from engine.models.base.model import Model, check_prompt_rows
from engine.models.registry import build_model
from engine.parallel.model import SplitModel
from engine.parallel.slices import check_dealt
from engine.quant.forms import form_line
from engine.weights.files import Shard

log = logging.getLogger("omniloop.engine")


def built(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: str, shards: Sequence[Shard] | None
) -> Model:
    """The model; `shards`: the headers of its files, if they decide about its layers."""
    build = functools.partial(build_model, dtype=dtype, device=device, shards=shards)
    ranks = config.tensor_parallel
    if ranks > 1:
        check_dealt(model_config, config, device)
        log.info("%d ranks are simulated on the CPU, for tests: they share its cores", ranks)
    whole = build(model_config)
    check_prompt_rows(config.enable_prompt_embeds, whole)
    if line := form_line(whole, None if device == "cpu" else target()):
        log.info("%s", line)
    return whole if ranks == 1 else SplitModel(whole, build, ranks)
