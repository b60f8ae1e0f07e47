"""Models that are a decoder of another family behind a tower of sound: how both are built.

Thread: device. The decoder's section of config.json names its family by its model_type (engine/models/media/seeing.py
reads it); the tower runs once per sound, and forward puts its rows in place of the placeholders' embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.base.model_config import ModelConfig
from engine.encoders.tower import Tower, by_modality
from engine.models.base.decoder import Decoder
from engine.models.media.seeing import decoder_family
from engine.weights.table import Row

# Of the tower's and the decoder's tensors: by transformers 5, and released.
PREFIXES = ("model.", "language_model.", "model.")


def hearing(
    tower: Callable[[Any, torch.dtype, str], Tower],
    rows: tuple[Row, ...],
    tower_name: str = "audio",
    ignore: tuple[str, ...] = (),
) -> Callable[..., Decoder]:
    """Family.model of decoders behind this kind of tower; `rows`: the tower's weight rows, of attribute `audio`.

    `tower_name`: among the Family's towers; `ignore`: tensors of the tower in checkpoints that are not used.
    """

    def made(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
        model = decoder_family(config.raw["text_config"], "config.json").model(config, dtype, device)
        assert isinstance(model, Decoder)
        audio = config.towers.get(tower_name)
        model.audio = None if audio is None else tower(audio, dtype, device)
        model.towers = by_modality(model.audio)
        table = model.table
        model.table = replace(table, rows=(*table.rows, *rows), prefixes=PREFIXES, ignore=(*table.ignore, *ignore))
        return model

    return made
