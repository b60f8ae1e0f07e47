"""The drafters over hidden states whose files are folders of their own, by their configurations. Thread: any."""

from __future__ import annotations

from typing import Any

from engine.models.base.decoder import Decoder
from engine.models.drafters.base import DraftModel
from engine.models.drafters.dflash import DFlash
from engine.models.drafters.dflash2 import DFlash2
from engine.models.drafters.dflash2_settings import DFlash2Config
from engine.models.drafters.dflash_settings import BlockConfig
from engine.models.drafters.drafter_config import DrafterConfig
from engine.models.drafters.dspark import DSpark
from engine.models.drafters.dspark_settings import DSparkConfig
from engine.models.drafters.eagle3 import Eagle3
from engine.models.drafters.eagle_settings import EagleConfig
from engine.weights.files import Shard

KINDS: dict[type[DrafterConfig], Any] = {
    EagleConfig: Eagle3,
    BlockConfig: DFlash,
    DFlash2Config: DFlash2,
    DSparkConfig: DSpark,
}


def drafter_of(config: DrafterConfig, target: Decoder, shards: list[Shard]) -> DraftModel:
    """A drafter without weights; `shards`: its files. Raises ConfigError."""
    drafter: DraftModel = KINDS[type(config)](config, target, shards)
    return drafter
