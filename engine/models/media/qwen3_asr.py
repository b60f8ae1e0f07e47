"""Qwen3-ASR (0.6B, 1.7B): a Qwen3 decoder that transcribes audio.

There are two layouts: Qwen's own, with everything in a thinker_config and the projector inside the tower, and
transformers'.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.qwen3_audio import Qwen3AudioConfig, Qwen3AudioTower, read_audio, rows
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table

THINKER = "thinker_config"
PROJECTORS = {  # whether config.json has a thinker_config -> names of the projector's layers
    True: ("audio_tower.proj1", "audio_tower.proj2"),
    False: ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
}


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder's config. Audio tokens have the same positions as text, so the three axes of Qwen's files are
    equal."""
    read = read_text(
        body, outer, sliding="switch", head_dim=128, qk_norm="head", rope=RopeDefaults(1_000_000.0), tied=True
    )
    layers = (replace(layer, rope=replace(layer.rope, mrope_section=(), mrope_turns="")) for layer in read.layers)
    return replace(read, layers=tuple(layers))


class Qwen3Asr(Llama):
    """Text and audio in; text out."""

    WEIGHTS = Table(
        rows=DECODER_ROWS,
        prefixes=("thinker.", "model.", "language_model."),
        ignore=(*DECODER_IGNORE, "audio_tower.positional_embedding.positional_embedding"),  # computed
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio")
        self.audio = Qwen3AudioTower(tower, dtype, device) if isinstance(tower, Qwen3AudioConfig) else None
        self.towers = by_modality(self.audio)
        audio_rows = rows("audio", "audio_tower", PROJECTORS[THINKER in config.raw])
        self.table = replace(self.table, rows=(*self.table.rows, *audio_rows))


FAMILY = Family(
    name="Qwen3-ASR",
    architectures=("Qwen3ASRForConditionalGeneration",),
    model=Qwen3Asr,
    text=text,
    towers={"audio": partial(read_audio, whole_chunks=True)},
    processor="qwen3_asr:Qwen3Asr",
    section=THINKER,
)
