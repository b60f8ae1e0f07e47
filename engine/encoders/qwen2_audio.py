"""The audio tower of Qwen2-Audio: Whisper's encoder over the audio's rows, pairs averaged, a projection.

Thread: device. The frames fill a whole window; rows of the silence after the audio are left out.

    mel [3000] -> conv, conv/2 [1500] -> [rows of the sound] -> layers -> pairs averaged -> norm -> projection
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.base.errors import RequestError
from engine.base.request import Modality
from engine.encoders.tower import Features
from engine.encoders.whisper import WhisperAudioConfig, WhisperTower, Window
from engine.layers.linear import Linear
from engine.weights.table import Row


@dataclass(frozen=True, slots=True)
class Qwen2AudioConfig(WhisperAudioConfig):
    """The encoder, and the decoder's width."""

    output_dim: int

    @property
    def row_width(self) -> int:
        return self.output_dim


PROJECTION = Row(("multi_modal_projector.linear",), "audio.proj")


class Qwen2AudioTower(WhisperTower):
    """Mel frames and their number -> rows of the decoder's width."""

    stack = 2
    averaged = True

    def __init__(self, config: Qwen2AudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.proj = Linear(config.hidden_size, config.output_dim, bias=True)

    def windows(self, features: Features) -> list[Window]:
        """num_frames: how many of the frames begin inside the audio."""
        frames = int(features["num_frames"])
        if not 3 <= frames <= 2 * self.config.num_positions:
            raise RequestError(f"num_frames={frames}: a sound has 3 to {2 * self.config.num_positions} frames")
        count = (frames + 1) // 2
        return [self.window(features["input_features"], count, count // 2 * 2)]  # a last odd row has no partner

    def projected(self, x: Tensor) -> Tensor:
        return self.proj(x)

    def example(self, modality: Modality, rows: int) -> Features:
        frames = min(4 * rows, 2 * self.config.num_positions)
        return {**super().example(modality, rows), "num_frames": torch.tensor(frames)}
