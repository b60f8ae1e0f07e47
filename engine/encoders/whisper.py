"""Whisper's encoder: the log-mel frames of a window of sound -> one row for each two frames, and some blank rows.

Thread: device. Every window has as many frames, silence behind its sound, and every row attends to all others. The
blank rows at the end bring their number to a multiple of ALIGNED, so that the decoder's text begins with a block of the
KV cache (engine/models/whisper.py); nobody reads them.

    mel [3000] -> conv, conv/2 [1500] + positions -> layers -> norm -> [1504]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders import sound
from engine.encoders.sound import EPS, KERNEL, AudioLayer, Rotations, unroll
from engine.encoders.tower import Features, Record
from engine.errors import ConfigError, RequestError
from engine.kernels.activation import gelu
from engine.layers.embed import Positions
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.request import Modality
from engine.weights.table import Row

ALIGNED = 32  # rows; a block of the KV cache has 16, or 32


@dataclass(frozen=True, slots=True)
class WhisperAudioConfig:
    """The encoder."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_mel_bins: int
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    num_positions: int

    @property
    def row_width(self) -> int:
        return self.hidden_size

    @property
    def num_rows(self) -> int:
        """Of a window, the blank ones included."""
        return span(self.num_positions)


def span(num_positions: int) -> int:
    """Tokens of a prompt that a window takes."""
    return -(-num_positions // ALIGNED) * ALIGNED


def read_audio(section: Section) -> WhisperAudioConfig:
    """The encoder's numbers, which stand beside the decoder's, checked."""
    act = section.values.get("activation_function", "gelu")
    if act != "gelu":
        raise ConfigError(f"{section.path}: activation_function={act!r}; Whisper is supported with 'gelu'")
    config = WhisperAudioConfig(
        num_mel_bins=section.size("num_mel_bins", 80),
        num_layers=section.integer("encoder_layers", least=1, most=MAX_LAYERS),
        num_heads=section.size("encoder_attention_heads"),
        hidden_size=section.size("d_model"),
        intermediate_size=section.size("encoder_ffn_dim"),
        num_positions=section.size("max_source_positions", 1500),
    )
    if config.hidden_size % config.num_heads:
        raise ConfigError(f"{section.path}: d_model={config.hidden_size} must be a multiple of its heads")
    return config


def rows(model: str, module: str) -> tuple[Row, ...]:
    """Weight rows of an encoder that hangs at attribute `model` and is called `module` in checkpoints."""
    return sound.rows(model, module, conv1="conv1", conv2="conv2", positions="embed_positions", norm="layer_norm")


class WhisperTower:
    """A window's mel frames -> rows of the decoder's width."""

    def __init__(self, config: WhisperAudioConfig, dtype: torch.dtype, device: str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        size = config.hidden_size
        self.conv1 = Linear(config.num_mel_bins * KERNEL, size, bias=True, fold=(config.num_mel_bins, KERNEL))
        self.conv2 = Linear(size * KERNEL, size, bias=True, fold=(size, KERNEL))
        self.positions: Positions | None = Positions(config.num_positions, size)
        self.turn: Rotations | None = None  # positions by rotation, in the place of learned ones
        self.layers = [AudioLayer(size, config.num_heads, config.intermediate_size) for _ in range(config.num_layers)]
        self.norm = LayerNorm(size, EPS)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return self.config.modalities

    @property
    def row_width(self) -> int:
        return self.config.row_width

    def encode(self, features: Features) -> Tensor:
        return self(features["input_features"])

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence; every window is as long."""
        shape = (self.config.num_mel_bins, 2 * self.config.num_positions)
        return {"input_features": torch.zeros(shape, device=self.device, dtype=self.dtype)}

    def picture_bytes(self, rows: int) -> int:
        return 0

    def record(self, record: Record) -> None:
        """No graph: a window is as much work as a large step."""

    def __call__(self, mel: Tensor) -> Tensor:
        """mel [num_mel_bins, 2 * num_positions] -> [num_rows, hidden_size]."""
        config = self.config
        rows = self.norm(self.heard(mel, config.num_positions))
        return functional.pad(rows, (0, 0, 0, config.num_rows - config.num_positions))

    def heard(self, mel: Tensor, count: int) -> Tensor:
        """The first `count` rows of a window behind the last layer, which attend to each other only."""
        config = self.config
        if mel.shape != (config.num_mel_bins, 2 * config.num_positions):
            raise RequestError(
                f"input_features {list(mel.shape)}: windows of {config.num_mel_bins} mel bins and "
                f"{2 * config.num_positions} frames are needed"
            )
        frames = mel.to(self.device, self.dtype).T[None]  # [1, frames, bins]
        x = gelu(self.conv2(unroll(gelu(self.conv1(unroll(frames, 1))), 2)))[0]
        x = x[:count] if self.positions is None else x[:count] + self.positions.table[:count]
        turn = None if self.turn is None else (self.turn[0][:count], self.turn[1][:count])
        bounds = torch.arange(0, count + 1, count, dtype=torch.int32, device=x.device)  # of the only segment
        for layer in self.layers:
            layer(x, bounds, turn)
        return x
