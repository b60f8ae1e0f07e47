"""The audio tower of Qwen2.5-Omni: log-mel frames of one audio -> embedding rows, 25 per second.

Thread: device. The frames are cut into chunks of 2 * n_window; each chunk passes two convolutions (the second halves
the rate) and attends to itself only, so the cost is linear in time. Then pairs of rows are averaged (halving once more)
and projected to the decoder's width. Convolutions are computed as matrix products over unrolled frames.

    mel [T] -> chunks [200] -> conv, conv/2 [100] + sinusoids -> layers -> pairs averaged [50] -> norm -> projection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders import sound
from engine.encoders.sound import EPS, KERNEL, AudioLayer, sinusoids, unroll
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import gelu
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

CHUNKS_AT_ONCE = 16  # bounds memory for long audio: unrolled frames take KERNEL times the memory of their source


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The audio tower of Qwen2.5-Omni (a Whisper encoder in chunks)."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_mel_bins: int
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    max_positions: int
    n_window: int  # half a chunk, in mel frames
    output_dim: int

    @property
    def row_width(self) -> int:
        return self.output_dim


def read_audio(section: Section) -> AudioConfig:
    """The tower's numbers, checked."""
    act = section.values.get("activation_function", "gelu")
    if act != "gelu":
        raise ConfigError(f"{section.path}: activation_function={act!r}; this tower is supported with 'gelu'")
    config = AudioConfig(
        num_mel_bins=section.size("num_mel_bins", 128),
        num_layers=section.integer("encoder_layers", least=1, most=MAX_LAYERS),
        num_heads=section.size("encoder_attention_heads"),
        hidden_size=section.size("d_model"),
        intermediate_size=section.size("encoder_ffn_dim"),
        max_positions=section.size("max_source_positions", 1500),
        n_window=section.size("n_window", 100),
        output_dim=section.size("output_dim"),
    )
    if config.hidden_size % config.num_heads or config.hidden_size % 2 or config.hidden_size < 4:
        raise ConfigError(f"{section.path}: d_model={config.hidden_size} must be even and a multiple of its heads")
    if config.n_window > config.max_positions:
        raise ConfigError(
            f"{section.path}: n_window={config.n_window} frames need as many positions; "
            f"max_source_positions={config.max_positions}"
        )
    return config


def rows(model: str, module: str) -> tuple[Row, ...]:
    """Weight rows of the model's attribute `model`, called `module` in checkpoints."""
    return sound.rows(model, module, conv1="conv1", conv2="conv2", norm="ln_post", proj="proj")


class QwenOmniAudioTower(LayeredTower):
    """Mel frames -> rows of the decoder's width."""

    config: AudioConfig

    def __init__(self, config: AudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size = config.hidden_size
        self.conv1 = Linear(config.num_mel_bins * KERNEL, size, bias=True, fold=(config.num_mel_bins, KERNEL))
        self.conv2 = Linear(size * KERNEL, size, bias=True, fold=(size, KERNEL))
        self.layers = [AudioLayer(size, config.num_heads, config.intermediate_size) for _ in range(config.num_layers)]
        self.norm = LayerNorm(size, EPS)
        self.proj = Linear(size, config.output_dim, bias=True)
        # One position per row that a chunk has after the convolutions; every chunk starts at position 0.
        self.positions = sinusoids(config.n_window, size).to(device, dtype)  # [n_window, hidden]

    def weight(self, features: Shapes) -> int:
        return (features["input_features"].shape[1] + 1) // 2

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has input_features [num_mel_bins, frames] -> [((frames + 1) // 2) // 2, output_dim]."""
        begun = [self._begun(features["input_features"]) for features in items]
        x = joined([rows for rows, _ in begun])
        lengths = [length for _, lengths in begun for length in lengths]
        bounds = bounds_of(lengths, x.device)
        yield from layer_by_layer(self.layers, x, bounds)
        counts = [len(rows) // 2 for rows, _ in begun]
        parts = x.split([len(rows) for rows, _ in begun])
        # The last row of an odd number of rows has no partner and is dropped.
        x = joined([part[: 2 * pairs].view(pairs, 2, -1).mean(1) for part, pairs in zip(parts, counts)])
        return apart(self.proj(self.norm(x)), counts)

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence; an odd number of frames for an odd number of rows."""
        mel = torch.zeros(self.config.num_mel_bins, 4 * rows - rows % 2, device=self.device, dtype=self.dtype)
        return {"input_features": mel}

    def _begun(self, mel: Tensor) -> tuple[Tensor, list[int]]:
        """mel [num_mel_bins, frames] -> the rows before the first layer [rows, hidden], and the number of rows per
        chunk."""
        bins, frames = mel.shape
        if bins != self.config.num_mel_bins or frames < 3:
            raise RequestError(
                f"input_features {list(mel.shape)}: {self.config.num_mel_bins} mel bins and at least 3 frames "
                "(0.03 seconds) of sound are needed"
            )
        length = min(2 * self.config.n_window, frames)
        count = -(-frames // length)
        chunks = functional.pad(mel.to(self.device, self.dtype).T, (0, 0, 0, count * length - frames))
        chunks = chunks.view(count, length, bins)
        parts = [
            self._convolve(chunks[first : first + CHUNKS_AT_ONCE], frames - first * length)
            for first in range(0, count, CHUNKS_AT_ONCE)
        ]
        x = torch.cat(parts)  # [count, half, hidden]
        half, rows = x.shape[1], (frames + 1) // 2
        x = (x + self.positions[:half]).view(count * half, -1)[:rows]
        return x, [min(half, rows - before) for before in range(0, rows, half)]

    def _convolve(self, chunks: Tensor, frames: int) -> Tensor:
        """[count, length, bins] -> [count, ceil(length / 2), hidden]; chunks do not see their neighbours."""
        count, length, _ = chunks.shape
        x = gelu(self.conv1(unroll(chunks, 1)))  # [count, length, hidden]
        x.view(count * length, -1)[frames:] = 0.0  # the last chunk's padding is silence for conv2, too
        return gelu(self.conv2(unroll(x, 2)))
