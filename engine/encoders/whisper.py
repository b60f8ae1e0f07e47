"""Whisper's encoder: the log-mel frames of an audio window -> one row for each two frames, and some blank rows.

Thread: device. Every window has the same number of frames, padded with silence, and every row attends to all rows.
Blank rows at the end pad the number of rows to a multiple of ALIGNED, so that the decoder's text starts at a new block
of the KV cache (engine/models/media/whisper.py); cross-attention skips them. Windows of all items run together.

    mel [3000] -> conv, conv/2 [1500] + positions -> layers -> norm -> [1504]
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders import sound
from engine.encoders.sound import EPS, KERNEL, AudioLayer, Rotations, unroll
from engine.encoders.tower import Features, LayeredTower, Pieces, Shapes, bounds_of, joined, layer_by_layer
from engine.kernels.activation import gelu
from engine.layers.embed import Positions
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

ALIGNED = 32  # rows; a block of the KV cache has 16 or 32 tokens


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
        """Rows of a window, including blank rows."""
        return span(self.num_positions)


def span(num_positions: int) -> int:
    """Prompt tokens that a window occupies."""
    return -(-num_positions // ALIGNED) * ALIGNED


def read_audio(section: Section) -> WhisperAudioConfig:
    """The encoder's configuration, checked; it is in the same section as the decoder's."""
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
    """Weight rows of the model's attribute `model`, an encoder called `module` in checkpoints."""
    return sound.rows(model, module, conv1="conv1", conv2="conv2", positions="embed_positions", norm="layer_norm")


class Window(NamedTuple):
    """A window, and the numbers of frames to encode and of rows to return."""

    mel: Tensor  # [num_mel_bins, frames]
    num_frames: int  # the encoder computes this many leading rows, which attend only to each other
    num_rows: int  # rows that the output or the projector gets, padded with zeros


class WhisperTower(LayeredTower):
    """Windows of mel frames -> rows of the decoder's width.

    Families with Whisper's encoder override the split of an item into windows, and the projection of the rows.
    """

    config: WhisperAudioConfig
    stack = 1  # encoder rows per output row
    averaged = False  # pairs of neighbouring rows are averaged before the norm

    def __init__(self, config: WhisperAudioConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size = config.hidden_size
        self.conv1 = Linear(config.num_mel_bins * KERNEL, size, bias=True, fold=(config.num_mel_bins, KERNEL))
        self.conv2 = Linear(size * KERNEL, size, bias=True, fold=(size, KERNEL))
        self.positions: Positions | None = Positions(config.num_positions, size)
        self.turn: Rotations | None = None  # rotary positions, which replace learned positions
        self.layers = [AudioLayer(size, config.num_heads, config.intermediate_size) for _ in range(config.num_layers)]
        self.norm = LayerNorm(size, EPS)

    def windows(self, features: Features) -> list[Window]:
        """The windows of one item. RequestError if its features contradict each other."""
        return [self.window(features["input_features"], self.config.num_positions, self.config.num_rows)]

    def projected(self, x: Tensor) -> Tensor:
        """Projects the rows of all windows, already normed, and averaged if the tower averages -> [rows, row_width]."""
        return x

    def weight(self, features: Shapes) -> int:
        shape = features["input_features"].shape
        return self.config.num_positions * (shape[0] if len(shape) == 3 else 1)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Runs the windows of all items, as many at once as `together` allows."""
        counts, windows, rows = [], [], list[Tensor]()
        for features in items:
            own = self.windows(features)
            counts.append(len(own))
            windows += own
        at_once = max(1, self.together // self.config.num_positions)
        for first in range(0, len(windows), at_once):
            rows += yield from self._rows_of(windows[first : first + at_once])
        if len(windows) == 1:
            return rows
        lines = iter(rows)
        return [torch.cat([next(lines) for _ in range(count)]) for count in counts]

    def example(self, modality: Modality, rows: int) -> Features:
        """A window of silence; all windows have the same length."""
        shape = (self.config.num_mel_bins, 2 * self.config.num_positions)
        return {"input_features": torch.zeros(shape, device=self.device, dtype=self.dtype)}

    def window(self, mel: Tensor, num_frames: int, num_rows: int) -> Window:
        """A checked window of full length."""
        config = self.config
        if mel.shape != (config.num_mel_bins, 2 * config.num_positions):
            raise RequestError(
                f"input_features {list(mel.shape)}: windows of {config.num_mel_bins} mel bins and "
                f"{2 * config.num_positions} frames are needed"
            )
        return Window(mel, num_frames, num_rows)

    def _rows_of(self, windows: Sequence[Window]) -> Generator[float, None, Sequence[Tensor]]:
        """The rows of each window; several windows' rows are views of one tensor."""
        x = yield from self._encoded(windows)
        if not self.averaged:
            x = self.norm(x)
        parts = x.split([window.num_frames for window in windows])
        x = joined([fitted(part, window.num_rows) for part, window in zip(parts, windows)])
        if self.averaged:
            x = self.norm(x.view(len(x) // 2, 2, -1).mean(1))
        return self.projected(x).split([window.num_rows // self.stack for window in windows])

    def _encoded(self, windows: Sequence[Window]) -> Generator[float, None, Tensor]:
        """The rows of the windows after the last layer, window after window: [rows, hidden]."""
        alike = [list(each) for _, each in groupby(windows, key=lambda window: window.mel.shape)]
        begun = [x for each in alike for x in self._begun(each)]
        x, counts = joined(begun), [window.num_frames for window in windows]
        turn = None
        if self.turn is not None:
            cos, sin = self.turn
            turn = joined([cos[:count] for count in counts]), joined([sin[:count] for count in counts])
        bounds = bounds_of(counts, x.device)
        yield from layer_by_layer(self.layers, x, bounds, turn)
        return x

    def _begun(self, windows: Sequence[Window]) -> list[Tensor]:
        """The input of the first layer for windows of one length, [rows, hidden] each."""
        frames = joined([window.mel.to(self.device, self.dtype).T[None] for window in windows])
        x = gelu(self.conv2(unroll(gelu(self.conv1(unroll(frames, 1))), 2)))
        rows = [one[: window.num_frames] for one, window in zip(x, windows)]
        if self.positions is None:
            return rows
        return [one + self.positions.table[: len(one)] for one in rows]


def fitted(x: Tensor, count: int) -> Tensor:
    """The first `count` rows, padded with zeros."""
    return x[:count] if count <= len(x) else functional.pad(x, (0, 0, 0, count - len(x)))
