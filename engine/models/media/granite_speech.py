"""Granite Speech (3.2, 3.3, 4.0): a Granite decoder that takes audio of any length.

Before 4.0 the checkpoint has an adapter (`has_lora_adapter`), which requests with audio use.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.base.model_config import ModelConfig
from engine.checkpoint.files import read_json
from engine.checkpoint.section import Section
from engine.encoders.granite_speech import UNREAD, GraniteSpeechTower, read_audio, rows
from engine.models.base.adapting import adapt, read_adapter
from engine.models.base.decoder import Decoder
from engine.models.base.family import Family
from engine.models.media import seeing
from engine.models.media.with_audio import PREFIXES, with_audio

ADAPTER = "adapter_config.json"
plain = with_audio(GraniteSpeechTower, rows(), tower_name="encoder", ignore=UNREAD)


def model(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder and tower, with the adapter if the checkpoint has one and the tower is loaded."""
    made = plain(config, dtype, device)
    if config.raw.get("has_lora_adapter"):
        made.table = replace(made.table, prefixes=("base_model.model.", *PREFIXES))
        if made.towers:
            adapt(made, [read_adapter(Section(read_json(Path(config.folder) / ADAPTER), ADAPTER), "audio")])
        else:
            made.table = replace(made.table, ignore=(*made.table.ignore, "*.lora_?.weight"))
    return made


FAMILY = Family(
    name="Granite Speech",
    architectures=("GraniteSpeechForConditionalGeneration",),
    model=model,
    text=partial(seeing.text, tied=True),
    towers={"encoder": read_audio},
    processor="granite_speech:GraniteSpeech",
)
