"""Builds models that combine an audio tower with a decoder of another family.

Thread: device. The model_type in the decoder's section of config.json names the decoder's family
(engine/models/media/seeing.py reads it). The tower runs once per item, and forward replaces the placeholders'
embeddings by the tower's rows.
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

# Prefixes of the tower's and the decoder's tensors, in transformers 5 and in released files.
PREFIXES = ("model.", "language_model.", "model.")


def with_audio(
    tower: Callable[[Any, torch.dtype, str], Tower],
    rows: tuple[Row, ...],
    tower_name: str = "audio",
    ignore: tuple[str, ...] = (),
) -> Callable[..., Decoder]:
    """Returns Family.model for a decoder with this tower; `rows`: weight rows of the tower, the attribute `audio`.

    `tower_name`: the tower's key in Family.towers; `ignore`: unused tensors of the tower in checkpoints.
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
