"""The audio tower of Qwen3-Omni and Qwen3-ASR: log-mel frames of one audio -> embedding rows, 13 per second.

Thread: device. The frames are cut into chunks of 2 * n_window; each chunk passes three convolutions, each of which
halves time and frequency. Rows attend to the rows of the same n_window_infer frames, so the cost is linear in time.
Convolutions are computed as matrix products over unrolled frames.

    mel [T] -> chunks [100] -> 3 times conv/2 [13] -> product + sinusoids -> layers -> norm -> product, gelu, product
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
from engine.encoders.sound import EPS, KERNEL, AudioLayer, sinusoids
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import gelu
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

CONVOLUTIONS = 3
CHUNKS_AT_ONCE = 16  # bounds memory: unrolled frames take KERNEL**2 / 4 times the memory of their source


@dataclass(frozen=True, slots=True)
class Qwen3AudioConfig:
    """The tower."""

    modalities: ClassVar[tuple[Modality, ...]] = ("audio",)
    row_parts: ClassVar[int] = 1

    num_mel_bins: int
    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    channels: int  # channels of the convolutions
    chunk: int  # mel frames that the convolutions see together
    window: int  # mel frames whose rows attend to each other
    output_dim: int
    whole_chunks: bool  # audio shorter than a chunk is padded with silence to a whole chunk

    @property
    def row_width(self) -> int:
        return self.output_dim


def read_audio(section: Section, whole_chunks: bool = False) -> Qwen3AudioConfig:
    """The tower's numbers, checked."""
    act = section.values.get("activation_function", "gelu")
    if act != "gelu":
        raise ConfigError(f"{section.path}: activation_function={act!r}; this tower is supported with 'gelu'")
    chunk = 2 * section.size("n_window", 50)
    config = Qwen3AudioConfig(
        num_mel_bins=section.size("num_mel_bins", 128),
        num_layers=section.integer("encoder_layers", least=1, most=MAX_LAYERS),
        num_heads=section.size("encoder_attention_heads"),
        hidden_size=section.size("d_model"),
        intermediate_size=section.size("encoder_ffn_dim"),
        channels=section.size("downsample_hidden_size", 480),
        chunk=chunk,
        window=section.size("n_window_infer", 800),
        output_dim=section.size("output_dim"),
        whole_chunks=whole_chunks,
    )
    if config.hidden_size % config.num_heads or config.hidden_size % 2 or config.hidden_size < 4:
        raise ConfigError(f"{section.path}: d_model={config.hidden_size} must be even and a multiple of its heads")
    if config.window % chunk:
        raise ConfigError(f"{section.path}: n_window_infer={config.window} must be a multiple of 2 * n_window={chunk}")
    return config


def rows(model: str, module: str, projector: tuple[str, str]) -> tuple[Row, ...]:
    """Weight rows of the model's attribute `model`, called `module` in checkpoints; `projector`: its last two
    layers."""
    modules = {"conv1": "conv2d1", "conv2": "conv2d2", "conv3": "conv2d3", "conv_out": "conv_out", "norm": "ln_post"}
    last = zip(projector, ("proj1", "proj2"))
    return (
        *sound.rows(model, module, sound.WHISPER, **modules),
        *(Row((name,), f"{model}.{part}") for name, part in last),
    )


def halved(length: int, times: int = CONVOLUTIONS) -> int:
    """A length after `times` convolutions with stride 2."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


class Qwen3AudioTower(LayeredTower):
    """Mel frames -> rows of the decoder's width.

    `row_parts`: parts per row in the model's other towers; audio rows are zero after the first part.
    """

    config: Qwen3AudioConfig

    def __init__(self, config: Qwen3AudioConfig, dtype: torch.dtype, device: str, row_parts: int = 1) -> None:
        super().__init__(config, dtype, device)
        self.row_parts = row_parts
        size, channels = config.hidden_size, config.channels
        self.conv1 = Linear(KERNEL**2, channels, bias=True, fold=(1, KERNEL, KERNEL))
        self.conv2, self.conv3 = (
            Linear(channels * KERNEL**2, channels, bias=True, fold=(channels, KERNEL, KERNEL)) for _ in range(2)
        )
        self.conv_out = Linear(channels * halved(config.num_mel_bins), size)
        self.layers = [
            AudioLayer(size, config.num_heads, config.intermediate_size, key_bias=True)
            for _ in range(config.num_layers)
        ]
        self.norm = LayerNorm(size, EPS)
        self.proj1 = Linear(size, size, bias=True)
        self.proj2 = Linear(size, config.output_dim, bias=True)
        self.positions = sinusoids(halved(config.chunk), size).to(device, dtype)  # every chunk starts at 0

    def example(self, modality: Modality, rows: int) -> Features:
        """Silence: as many frames as make `rows` rows."""
        chunks, rest = divmod(rows, halved(self.config.chunk))
        frames = chunks * self.config.chunk + rest * 2**CONVOLUTIONS
        return {"input_features": torch.zeros(self.config.num_mel_bins, frames, device=self.device, dtype=self.dtype)}

    def weight(self, features: Shapes) -> int:
        return halved(features["input_features"].shape[1])

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has input_features [num_mel_bins, frames] -> [rows, output_dim]."""
        config = self.config
        begun = [self._convolved(features["input_features"]) for features in items]
        per_window = config.window // config.chunk * halved(config.chunk)
        lengths = [min(per_window, len(x) - before) for x in begun for before in range(0, len(x), per_window)]
        x = joined(begun)
        bounds = bounds_of(lengths, x.device)
        yield from layer_by_layer(self.layers, x, bounds)
        rows = self.proj2(gelu(self.proj1(self.norm(x))))
        more = (self.row_parts - 1) * config.output_dim
        return apart(functional.pad(rows, (0, more)) if more else rows, [len(x) for x in begun])

    def _convolved(self, mel: Tensor) -> Tensor:
        """The rows before the layers, [rows, hidden]."""
        config = self.config
        if mel.dim() != 2 or mel.shape[0] != config.num_mel_bins or not mel.shape[1]:
            raise RequestError(
                f"input_features {list(mel.shape)}: {config.num_mel_bins} mel bins and at least 1 frame are needed"
            )
        frames = mel.shape[1]
        length = config.chunk if config.whole_chunks else min(config.chunk, frames)
        count = -(-frames // length)
        chunks = functional.pad(mel.to(self.device, self.dtype), (0, count * length - frames))
        chunks = chunks.view(config.num_mel_bins, count, length, 1).transpose(0, 1)  # [count, bins, length, 1]
        parts = []
        for first in range(0, count, CHUNKS_AT_ONCE):
            x = chunks[first : first + CHUNKS_AT_ONCE]
            for product in (self.conv1, self.conv2, self.conv3):
                x = gelu(product(unroll(x)))
            parts.append(self.conv_out(x.permute(0, 2, 3, 1).flatten(2)) + self.positions[: x.shape[2]])
        rows = torch.cat(parts).flatten(0, 1)
        return rows[: (count - 1) * halved(length) + halved(frames - (count - 1) * length)]


def unroll(x: Tensor) -> Tensor:
    """[count, height, width, channels] -> [count, height / 2, width / 2, channels * KERNEL^2], both rounded up."""
    padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
    windows = padded.unfold(1, KERNEL, 2).unfold(2, KERNEL, 2)  # [.., channels, KERNEL, KERNEL], a view
    return windows.flatten(3)
