"""Qwen3-VL: a Qwen3 decoder with interleaved position axes, and a tower that also feeds its first layers (deepstack).

Thread: device. A row of the tower has parts. Part 0 replaces the placeholder's embedding; part n is added to the
residual stream after decoder layer n - 1.
"""

from __future__ import annotations

import torch

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.qwen_vl.config import read_vision3
from engine.encoders.qwen_vl.names import QWEN3
from engine.layers.batch import Batch
from engine.layers.stream import Stream
from engine.models.base.family import Family
from engine.models.media.qwen2_vl import Qwen2VL, seeing


class Qwen3VL(Qwen2VL):
    """Text, image and video in; text out."""

    WEIGHTS = seeing(QWEN3)

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        if config.row_parts > len(config.text.layers):
            raise ConfigError(
                f"config.json: vision_config: deepstack_visual_indexes feeds {config.row_parts - 1} layers of the "
                f"decoder; its {len(config.text.layers)} must be more"
            )

    def after_layer(self, number: int, x: Stream, batch: Batch) -> None:
        if number + 1 >= self.config.row_parts or (batch.overlay is None and not batch.media):
            return
        width, stream = self.config.text.hidden_size, x.rows()
        part = slice((number + 1) * width, (number + 2) * width)
        if batch.overlay is not None:
            visible, rows = batch.overlay
            stream += torch.where(visible, rows[:, part], 0.0)
        for start, length, rows in batch.media:
            stream[start : start + length] += rows[:, part]


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    rope = RopeDefaults(500_000.0, sections=(24, 20, 20), turns=True)
    return read_text(body, outer, rope=rope, head_dim=128, qk_norm="head")


FAMILY = Family(
    name="Qwen3-VL",
    architectures=("Qwen3VLForConditionalGeneration",),
    model=Qwen3VL,
    text=text,
    towers={"vision": read_vision3},
    processor="qwen3_vl:Qwen3VL",
)
