"""The vision tower of dots.ocr: the patches of a picture -> rows for the decoder.

Thread: device. In and out: see blocks.py. A norm follows the patch embedding, and another the layers, which have
rotations by row and column and no biases. A LayerNorm and two linear layers merge a block's patches into one row. The
formulas are those of modeling_dots_vision.py in https://huggingface.co/rednote-hilab/dots.ocr.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.blocks import BlockTower, GatedLayer, Grid, by_block, frame_bounds, turns_of
from engine.encoders.recent import Recent
from engine.encoders.tower import joined, layer_by_layer
from engine.kernels.activation import gelu
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.weights.table import Row

MAX_TABLE_ROWS = 65_536  # patches whose rotations are cached
THETA, MERGER_EPS = 10_000.0, 1e-6


@dataclass(frozen=True, slots=True)
class DotsVisionConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    merge_size: int
    row_width: int
    post_norm: bool
    eps: float


def read_vision(section: Section) -> DotsVisionConfig:
    """The tower's numbers, checked; in the file, `hidden_size` is the width of its rows."""
    hidden, heads = section.size("embed_dim", 1536), section.size("num_attention_heads", 12)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(
            f"{section.path}: embed_dim={hidden} over num_attention_heads={heads} must give heads of a multiple of 4 "
            "(rotary positions along two axes)"
        )
    for key, served in (("use_bias", False), ("is_causal", False), ("temporal_patch_size", 1)):
        if (given := section.values.get(key, served)) != served:
            raise ConfigError(f"{section.path}: {key}={given!r}; this tower is supported with {served!r}")
    return DotsVisionConfig(
        num_layers=section.integer("num_hidden_layers", 42, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=section.size("intermediate_size", 4224),
        num_heads=heads,
        in_channels=section.size("num_channels", 3),
        patch_size=section.size("patch_size", 14),
        merge_size=section.size("spatial_merge_size", 2),
        row_width=section.size("hidden_size", 1536),
        post_norm=section.boolean("post_norm", True),
        eps=section.number("rms_norm_eps", 1e-5),
    )


TOWER, LAYER, TARGET = "vision_tower.", "vision_tower.blocks.*.", "vision.layers.*."
ROWS = (
    Row((TOWER + "patch_embed.patchifier.proj",), "vision.patch_embed"),
    Row((TOWER + "patch_embed.patchifier.norm",), "vision.patch_norm"),
    Row((LAYER + "norm1",), TARGET + "norm1"),
    Row((LAYER + "attn.qkv",), TARGET + "qkv"),
    Row((LAYER + "attn.proj",), TARGET + "out"),
    Row((LAYER + "norm2",), TARGET + "norm2"),
    Row((LAYER + "mlp.fc1", LAYER + "mlp.fc3"), TARGET + "up"),
    Row((LAYER + "mlp.fc2",), TARGET + "down"),
    Row((TOWER + "post_trunk_norm",), "vision.post_norm"),
    Row((TOWER + "merger.ln_q",), "vision.merger_norm"),
    Row((TOWER + "merger.mlp.0",), "vision.merger_in"),
    Row((TOWER + "merger.mlp.2",), "vision.merger_out"),
)


class DotsVisionTower(BlockTower):
    """Patches -> rows of the decoder's width."""

    config: DotsVisionConfig

    def __init__(self, config: DotsVisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, block = config.hidden_size, config.hidden_size * config.merge_size**2
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        sizes = size, config.num_heads, config.intermediate_size, config.eps, False
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.patch_norm = RMSNorm(size, config.eps)
        self.layers = [GatedLayer(*sizes) for _ in range(config.num_layers)]
        self.post_norm = RMSNorm(size, config.eps) if config.post_norm else None
        self.merger_norm = LayerNorm(size, MERGER_EPS)
        self.merger_in = Linear(block, block, bias=True)
        self.merger_out = Linear(block, config.row_width, bias=True)
        self._turns: Recent[Grid, tuple[Tensor, Tensor]] = Recent(MAX_TABLE_ROWS)

    def rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        x = self.patch_norm(self.patch_embed(patches))
        cos, sin = (joined(each) for each in zip(*map(self._turns_of, grids)))
        yield from layer_by_layer(self.layers, x, frame_bounds(grids, x.device), cos, sin)
        if self.post_norm is not None:
            x = self.post_norm(x)
        blocks = self.merger_norm(x).view(-1, self.merger_in.in_features)
        return self.merger_out(gelu(self.merger_in(blocks)))

    def _turns_of(self, grid: Grid) -> tuple[Tensor, Tensor]:
        known = self._turns.get(grid)
        if known is None:
            times, height, width = grid
            row, column = by_block(height, width, self.config.merge_size)
            cos, sin = turns_of(row, column, self.config.hidden_size // self.config.num_heads, THETA)
            known = cos.repeat(times, 1).to(self.device), sin.repeat(times, 1).to(self.device)
            self._turns.put(grid, known, len(known[0]))
        return known
