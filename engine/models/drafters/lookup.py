"""Finds and builds the drafter that the operator names, without weights, and matches it with its files.

Thread: any. In: the engine's settings and the target. Out: the drafts of the settings, and the drafter. ConfigError
names what does not fit; nothing but headers is read.
"""

from __future__ import annotations

from dataclasses import replace

from engine.base.config import EngineConfig
from engine.base.drafts import DRAFT_MODEL, HEADS, MTP, DraftConfig
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.drafters.base import DraftModel
from engine.models.drafters.draft_model import SmallDecoder
from engine.models.drafters.kinds import drafter_of
from engine.models.drafters.mtp import Mtp
from engine.models.drafters.settings import drafts_of, read_draft_model
from engine.models.drafters.small_head import quantise
from engine.models.registry import build_model
from engine.quant.assign import assign
from engine.weights.files import open_checkpoint
from engine.weights.load import match


def drafter_for(config: EngineConfig, target: Model) -> tuple[DraftConfig, DraftModel] | None:
    """The drafts and their drafter; None: the settings name no drafter over hidden states. Raises ConfigError."""
    found = drafts_of(config, target.config)
    if found is None or found[0].method not in (*HEADS, MTP):
        return None
    drafts, options = found
    assert isinstance(target, Decoder), "other models are refused"
    folder = target.config.folder if options is None else options.folder
    drawn = config.load_format == "dummy"  # such a head has no tensors that may be left out
    shards = [] if drawn else open_checkpoint(folder)
    drafter: DraftModel
    if options is None:
        drafter = Mtp(target, drafts.small_head)
        # The layer may be quantised as the target is.
        assign(drafter, drafter.weight_table(), target.config, None if drawn else shards)
    else:
        drafter = drafter_of(replace(options, small_head=drafts.small_head), target, shards)
    if not drawn:
        match(drafter, shards, folder)
    return drafts, drafter


def draft_model_for(config: EngineConfig, target: Model) -> tuple[DraftConfig, SmallDecoder] | None:
    """The drafts and their model; None: the settings name no draft model. Raises ConfigError."""
    found = drafts_of(config, target.config)
    if found is None or found[0].method != DRAFT_MODEL:
        return None
    drafts = found[0]
    read = replace(read_draft_model(drafts.model, target.config), max_model_len=drafts.longest)
    shards = None if config.load_format == "dummy" else open_checkpoint(drafts.model)
    model = build_model(read, target.dtype, target.device, shards)
    assert isinstance(model, Decoder), "other models are refused"
    if drafts.small_head and model.head is not None:
        quantise(model.head)
    drafter = SmallDecoder(model, target, drafts.longest)
    if shards is not None:
        match(model, shards, drafts.model)
    return drafts, drafter
