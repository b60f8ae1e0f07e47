"""Qwen3-Omni's thinker (30B-A3B): Qwen3-VL's decoder with experts, its vision tower, and Qwen3's audio tower.

Thread: device. Audio rows have as many parts as picture rows; all parts but the first are zero. The talker and the
vocoder of the full checkpoint are not read: answers are text.
"""

from __future__ import annotations

import torch

from engine.base.model_config import ModelConfig, TextConfig
from engine.checkpoint.experts import read_experts, with_experts
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.section import Section
from engine.checkpoint.text import read_text
from engine.encoders.qwen3_audio import Qwen3AudioConfig, Qwen3AudioTower, read_audio, rows
from engine.encoders.qwen_vl import names as qwen_vl
from engine.encoders.qwen_vl.config import read_vision3
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.media.qwen3_vl import Qwen3VL
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS
from engine.models.text.qwen3_moe import sparse_layers
from engine.models.text.sparse import sparse_rows
from engine.weights.table import Table


class Qwen3OmniThinker(Qwen3VL):
    """Text, image, video and audio in; text out."""

    WEIGHTS = Table(
        rows=(
            *DECODER_ROWS,
            *sparse_rows(),
            *qwen_vl.rows("vision", "visual", qwen_vl.QWEN3_OMNI),
            *rows("audio", "audio_tower", ("audio_tower.proj1", "audio_tower.proj2")),
        ),
        # Released names: thinker.model.layers, thinker.visual; transformers 5: model.layers, visual.
        prefixes=("thinker.", "model.", "language_model."),
        ignore=(
            *DECODER_IGNORE,
            "audio_tower.positional_embedding.positional_embedding",  # computed
            "talker.*",
            "code2wav.*",
        ),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        audio = config.towers.get("audio")
        if isinstance(audio, Qwen3AudioConfig):
            self.audio = Qwen3AudioTower(audio, dtype, device, config.row_parts)
        self.towers = by_modality(self.vision, self.audio)


def text(body: Section, outer: Section) -> TextConfig:
    """The decoder."""
    rope = RopeDefaults(1_000_000.0, sections=(24, 20, 20), turns=True)
    read = read_text(body, outer, rope=rope, head_dim=128, qk_norm="head")
    experts = read_experts(body, norm_topk_prob=body.boolean("norm_topk_prob", True))
    return with_experts(read, experts, sparse_layers(body, len(read.layers)))


FAMILY = Family(
    name="Qwen3-Omni",
    architectures=("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
    model=Qwen3OmniThinker,
    text=text,
    towers={"vision": read_vision3, "audio": read_audio},
    processor="qwen3_omni:Qwen3Omni",
    section="thinker_config",
)
