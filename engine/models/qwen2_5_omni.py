"""Qwen2.5-Omni's thinker: a Qwen2 decoder with three position axes, a vision and an audio tower.

Thread: device. Positions come in ready made, [3, T] (mm/splice counts them); towers run once per media item through
`encode`, and forward puts their rows in place of the placeholders' embeddings. The talker and the vocoder of the full
checkpoint are left unread: answers are text.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from engine.checkpoint.text import read_text
from engine.encoders import qwen_omni_audio
from engine.encoders.qwen_omni_audio import AudioConfig, QwenOmniAudioTower, read_audio
from engine.encoders.qwen_vl import tower as qwen_vl
from engine.encoders.qwen_vl.config import VisionConfig, read_vision
from engine.encoders.qwen_vl.graphs import Record
from engine.model_config import ModelConfig
from engine.models.family import Family
from engine.models.llama import DECODER_IGNORE, DECODER_ROWS, Llama
from engine.weights.table import Table


class Qwen25OmniThinker(Llama):
    """Text, image, video and audio in; text out."""

    WEIGHTS = Table(
        rows=(*DECODER_ROWS, *qwen_vl.rows("vision", "visual"), *qwen_omni_audio.rows("audio", "audio_tower")),
        # Released: thinker.model.layers, thinker.visual; by transformers 5: model.language_model.layers, model.visual.
        prefixes=("thinker.", "model.", "language_model."),
        ignore=(
            *DECODER_IGNORE,
            "audio_tower.audio_bos_eos_token.weight",  # trained, never read by the forward pass
            "audio_tower.positional_embedding.positional_embedding",  # computed
            "talker.*",
            "token2wav.*",
        ),
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        vision, audio = config.towers.get("vision"), config.towers.get("audio")
        self.vision = qwen_vl.QwenVisionTower(vision, dtype, device) if isinstance(vision, VisionConfig) else None
        self.audio = QwenOmniAudioTower(audio, dtype, device) if isinstance(audio, AudioConfig) else None

    def media_examples(self, max_rows: int) -> list[tuple[str, dict[str, Tensor]]]:
        found: list[tuple[str, dict[str, Tensor]]] = []
        if self.vision is not None:
            merge, side = self.vision.config.merge_size, math.isqrt(max_rows)
            small = ((1, 1, 1), (1, 2, 2), (2, 1, 3), (1, 3, 5), (2, 3, 5), (16, 2, 2), (1, 4, 64))
            for t, h, w in ((1, side, side), *small):
                grid = (t, min(h, side) * merge, min(w, side) * merge)  # frames and patches
                found.append(("image", self.vision.example(grid, shrunk=h == 2)))
        if self.audio is not None:
            for frames in (4 * max_rows, 3, 64, 3000, 3001):
                mel = torch.zeros(self.audio.config.num_mel_bins, frames, device=self.device, dtype=self.dtype)
                found.append(("audio", {"input_features": mel}))
        return found

    def picture_bytes(self, max_rows: int) -> int:
        if self.vision is None or self.device == "cpu":
            return 0
        return 4 * max_rows * (self.vision.config.patch_size * self.vision.config.merge_size) ** 2

    def record_towers(self, record: Record) -> None:
        if self.vision is not None:
            self.vision.capture(record)

    def encode(self, modality: str, features: dict[str, Tensor]) -> Tensor:
        """image, video: patches or pixels, as the tower's `patches` tells; audio: input_features [mels, frames]."""
        if modality in ("image", "video") and self.vision is not None:
            return self.vision(self.vision.patches(features), features["grid_thw"])
        if modality == "audio" and self.audio is not None:
            return self.audio(features["input_features"])
        return super().encode(modality, features)


FAMILY = Family(
    name="Qwen2.5-Omni",
    model=Qwen25OmniThinker,
    text=partial(read_text, sliding="switch", theta=1_000_000.0, mrope_section=(16, 24, 24), qkv_bias=True),
    towers={"vision": read_vision, "audio": read_audio},
    processor="qwen_omni:QwenOmni",
    section="thinker_config",
)
