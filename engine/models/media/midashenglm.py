"""MiDashengLM: the Qwen2 decoder of Qwen2.5-Omni's thinker, with the audio tower Dasheng (engine/encoders/dasheng).

Audio tokens have the same positions as text, so the three position axes of Qwen's files are equal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.dasheng import ROWS, UNREAD, DashengConfig, DashengTower, read_audio
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table


class MiDashengLM(Llama):
    """Text and audio in; text out."""

    WEIGHTS = Table((*DECODER_ROWS, *ROWS), prefixes=("decoder.", "model."), ignore=(*DECODER_IGNORE, *UNREAD))

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        tower = config.towers.get("audio_encoder")
        self.audio = DashengTower(tower, dtype, device) if isinstance(tower, DashengConfig) else None
        self.towers = by_modality(self.audio)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    read = read_text(body, outer, sliding="switch", qkv_bias=True)
    layers = (replace(layer, rope=replace(layer.rope, mrope_section=())) for layer in read.layers)
    return replace(read, layers=tuple(layers))


FAMILY = Family(
    name="MiDashengLM",
    architectures=("MiDashengLMModel",),
    model=MiDashengLM,
    text=text,
    towers={"audio_encoder": read_audio},
    processor="midashenglm:MiDashengLM",
)
