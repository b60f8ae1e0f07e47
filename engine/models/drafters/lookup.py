"""Finds and builds the drafter that the operator names, without weights, and matches it with its files.

Thread: any. In: the engine's settings and the target. Out: the drafts of the settings, and the drafter. ConfigError
names what does not fit; nothing but headers is read.
"""

from __future__ import annotations

from engine.base.config import EngineConfig
from engine.base.drafts import NGRAM, DraftConfig
from engine.models.base.decoder import Decoder
from engine.models.base.model import Model
from engine.models.drafters.base import DraftModel
from engine.models.drafters.eagle3 import Eagle3
from engine.models.drafters.mtp import Mtp
from engine.models.drafters.settings import drafts_of
from engine.weights.files import open_checkpoint
from engine.weights.load import match


def drafter_for(config: EngineConfig, target: Model) -> tuple[DraftConfig, DraftModel] | None:
    """The drafts and their drafter; None: the settings name no drafter. Raises ConfigError."""
    found = drafts_of(config, target.config)
    if found is None or found[0].method == NGRAM:
        return None
    drafts, options = found
    assert isinstance(target, Decoder), "other models are refused"
    folder = target.config.folder if options is None else options.folder
    shards = open_checkpoint(folder)
    drafter: DraftModel = Mtp(target) if options is None else Eagle3(options, target, shards)
    match(drafter, shards, folder)
    return drafts, drafter
