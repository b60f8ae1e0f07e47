"""Ultravox's tower: Whisper's encoder over the audio's frames, eight rows concatenated, then a small gated MLP.

Thread: device. A window of thirty seconds attends to itself only and is not padded with silence; zeros complete its
last group of eight rows. (The published code pads the last of several windows with silence, so up to seven eighths of
its last row hold silence.)

    mel [T] -> conv, conv/2 [T / 2] -> layers -> norm -> 8 side by side [T / 16] -> norm, product, gate, norm, product
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import Section
from engine.checkpoint.text import complete
from engine.encoders import whisper
from engine.encoders.tower import Features
from engine.encoders.whisper import WhisperAudioConfig, WhisperTower, Window
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.weights.table import Row

EPS = 1e-6
HALVED = 2  # frames per row after the convolutions
UNSAID = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}  # defaults


@dataclass(frozen=True, slots=True)
class UltravoxConfig(WhisperAudioConfig):
    """The configuration of the encoder, and of the projector after it."""

    output_dim: int  # width of the decoder
    stack: int  # encoder rows per output row
    width: int  # output width of the first linear layer: values, then their gates
    norm_inside: bool  # the second norm comes before the second linear layer (since 0.5), else after it

    @property
    def row_width(self) -> int:
        return self.output_dim

    @property
    def window_rows(self) -> int:
        """Rows of a whole window."""
        return -(-self.num_positions // self.stack)


def read_audio(section: Section) -> UltravoxConfig:
    """The tower's numbers, checked."""
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    for key, needed in (("projector_act", "swiglu"), ("num_projector_layers", 0), ("audio_latency_block_size", None)):
        given = outer.values.get(key, needed)
        if given != needed:
            raise ConfigError(f"{outer.path}: {key}={given!r}; Ultravox is supported with {needed!r}")
    encoder = whisper.read_audio(Section({**UNSAID, **section.values}, section.path, outer))
    given_fields: dict[str, Any] = {field.name: getattr(encoder, field.name) for field in dataclasses.fields(encoder)}
    width = outer.size("hidden_size", 4096)
    if width % 2:
        raise ConfigError(f"{outer.path}: hidden_size={width} must be even: half of the numbers are gates")
    return UltravoxConfig(
        **given_fields,
        output_dim=complete(outer.section("text_config")).size("hidden_size"),
        stack=outer.size("stack_factor", 8),
        width=width,
        norm_inside=outer.boolean("projector_ln_mid", False),
    )


class UltravoxTower(WhisperTower):
    """Mel frames of a sound -> rows of the decoder's width."""

    config: UltravoxConfig

    def __init__(self, config: UltravoxConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        self.stack = config.stack
        deep = config.stack * config.hidden_size
        self.norm_before = RMSNorm(deep, EPS)
        self.proj1 = Linear(deep, config.width)
        self.norm_inside = RMSNorm(config.width // 2, EPS) if config.norm_inside else None
        self.proj2 = Linear(config.width // 2, config.output_dim)
        self.norm_behind = None if config.norm_inside else RMSNorm(config.output_dim, EPS)

    def windows(self, features: Features) -> list[Window]:
        """input_features [windows, mels, frames]; num_frames: total frames of all windows, without padding."""
        mels, left, most = features["input_features"], int(features["num_frames"]), HALVED * self.config.num_positions
        fits = mels.dim() == 3 and mels.shape[1] == self.config.num_mel_bins and mels.shape[2] <= most
        if not fits or not (len(mels) - 1) * mels.shape[2] < left <= len(mels) * mels.shape[2]:
            raise RequestError(
                f"num_frames={left}: input_features {list(mels.shape)} must be windows of "
                f"{self.config.num_mel_bins} mel bins and at most {most} frames that hold as many"
            )
        found = []
        for mel in mels:
            frames = min(left, mel.shape[1])
            rows = -(-frames // HALVED)
            found.append(Window(mel[:, :frames], rows, -(-rows // self.stack) * self.stack))
            left -= frames
        return found

    def projected(self, x: Tensor) -> Tensor:
        value, gate = self.proj1(self.norm_before(x.view(len(x) // self.stack, -1))).chunk(2, dim=-1)
        x = value * functional.silu(gate)
        x = self.proj2(x if self.norm_inside is None else self.norm_inside(x))
        return x if self.norm_behind is None else self.norm_behind(x)

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence: whole windows, or one shorter window."""
        config = self.config
        count, frames = max(1, rows // config.window_rows), HALVED * min(config.num_positions, rows * config.stack)
        mel = torch.zeros(count, config.num_mel_bins, frames, device=self.device, dtype=self.dtype)
        return {"input_features": mel, "num_frames": torch.tensor(count * frames)}


def rows(module: str) -> tuple[Row, ...]:
    """Weight rows of a tower at the model's attribute `audio`; `module`: the encoder's name in checkpoints."""
    names = {"ln_pre": "norm_before", "linear_1": "proj1", "ln_mid": "norm_inside", "linear_2": "proj2"}
    projector = {**names, "ln_post": "norm_behind"}
    return (
        *whisper.rows("audio", module),
        *(Row((f"multi_modal_projector.{name}",), f"audio.{part}") for name, part in projector.items()),
    )
