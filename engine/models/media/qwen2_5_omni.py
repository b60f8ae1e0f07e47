"""Qwen2.5-Omni's thinker: a Qwen2 decoder with three position axes, a vision and an audio tower.

Thread: device. mm/splice computes the positions, [3, T]. Towers run once per media item, and forward replaces the
placeholders' embeddings by the towers' rows. The talker and the vocoder of the full checkpoint are not read: answers
are text.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.base.model_config import ModelConfig
from engine.checkpoint.rope import RopeDefaults
from engine.checkpoint.text import read_text
from engine.encoders import qwen_omni_audio
from engine.encoders.qwen_omni_audio import AudioConfig, QwenOmniAudioTower, read_audio
from engine.encoders.qwen_vl import names as qwen_vl
from engine.encoders.qwen_vl.config import VisionConfig, read_vision
from engine.encoders.qwen_vl.tower import QwenVisionTower
from engine.encoders.tower import by_modality
from engine.models.base.family import Family
from engine.models.text.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table


class Qwen25OmniThinker(Llama):
    """Text, image, video and audio in; text out."""

    WEIGHTS = Table(
        rows=(
            *DECODER_ROWS,
            *qwen_vl.rows("vision", "visual", qwen_vl.OMNI),
            *qwen_omni_audio.rows("audio", "audio_tower"),
        ),
        # Released names: thinker.model.layers, thinker.visual; transformers 5: model.language_model.layers,
        # model.visual.
        prefixes=("thinker.", "model.", "language_model."),
        ignore=(
            *DECODER_IGNORE,
            "audio_tower.audio_bos_eos_token.weight",  # trained, but not used by the forward pass
            "audio_tower.positional_embedding.positional_embedding",  # computed
            "talker.*",
            "token2wav.*",
        ),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision, audio = config.towers.get("vision"), config.towers.get("audio")
        self.vision = QwenVisionTower(vision, dtype, device) if isinstance(vision, VisionConfig) else None
        self.audio = QwenOmniAudioTower(audio, dtype, device) if isinstance(audio, AudioConfig) else None
        self.towers = by_modality(self.vision, self.audio)


FAMILY = Family(
    name="Qwen2.5-Omni",
    architectures=(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniModel",
    ),
    model=Qwen25OmniThinker,
    text=partial(read_text, sliding="switch", rope=RopeDefaults(1_000_000.0, sections=(16, 24, 24)), qkv_bias=True),
    towers={"vision": read_vision, "audio": read_audio},
    processor="qwen_omni:QwenOmni",
    section="thinker_config",
)
