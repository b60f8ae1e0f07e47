"""The vision tower of GLM-4.1V and 4.5V: patches of a picture, or of a video's frames -> rows for the decoder.

Thread: device. In and out: see blocks.py. Each patch has a learned position, interpolated to the picture's shape, and
rotations by row and column. After the layers a linear layer merges a block's patches into one row, which passes an MLP.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.blocks import BlockTower, GatedLayer, Grid, by_block, frame_bounds, turns_of
from engine.encoders.recent import Recent
from engine.encoders.tower import joined, layer_by_layer
from engine.kernels.activation import Activation, gelu
from engine.layers.embed import Positions
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.weights.table import Row

MAX_TABLE_ROWS = 65_536  # patches whose tables are cached
Tables = tuple[Tensor, Tensor, Tensor]  # cos, sin [patches, head_dim / 2]; sampling points [1, patches, 1, 2]


@dataclass(frozen=True, slots=True)
class GlmVisionConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    side: int  # learned positions form a square of side x side
    row_width: int  # also the inner size of each layer's MLP
    merger_size: int  # inner size of the MLP after the layers
    qkv_bias: bool
    eps: float
    rope_theta: float


def read_vision(section: Section) -> GlmVisionConfig:
    """The tower's numbers, checked."""
    act = str(section.values.get("hidden_act") or "silu")
    if act != "silu":
        raise ConfigError(f"{section.path}: hidden_act={act!r}; this tower is supported with 'silu'")
    hidden, heads = section.size("hidden_size", 1536), section.size("num_heads", 12)
    patch, image = section.size("patch_size", 14), section.size("image_size", 336)
    if hidden % heads or hidden // heads % 4 or image < patch:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} over num_heads={heads} must give heads of a multiple of 4 (rotary "
            f"positions along two axes), and image_size={image} at least patch_size={patch}"
        )
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    return GlmVisionConfig(
        num_layers=section.integer("depth", 24, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        in_channels=section.size("in_channels", 3),
        patch_size=patch,
        temporal_patch_size=section.size("temporal_patch_size", 2),
        merge_size=section.size("spatial_merge_size", 2),
        side=image // patch,
        row_width=section.size("out_hidden_size", 4096),
        merger_size=section.size("intermediate_size", 13_696),
        qkv_bias=section.boolean("attention_bias", False),
        eps=section.number("rms_norm_eps", 1e-5),
        rope_theta=rope.number("rope_theta", 10_000.0),
    )


LAYER, TARGET = "visual.blocks.*.", "vision.layers.*."
ROWS = (
    Row(("visual.patch_embed.proj",), "vision.patch_embed"),
    Row(("visual.post_conv_layernorm",), "vision.patch_norm"),
    Row(("visual.embeddings.position_embedding",), "vision.positions"),
    Row((LAYER + "norm1",), TARGET + "norm1"),
    Row((LAYER + "attn.qkv",), TARGET + "qkv"),
    Row((LAYER + "attn.proj",), TARGET + "out"),
    Row((LAYER + "norm2",), TARGET + "norm2"),
    Row((LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"), TARGET + "up"),
    Row((LAYER + "mlp.down_proj",), TARGET + "down"),
    Row(("visual.post_layernorm",), "vision.post_norm"),
    Row(("visual.downsample",), "vision.downsample"),
    Row(("visual.merger.proj",), "vision.merger_in"),
    Row(("visual.merger.post_projection_norm",), "vision.merger_norm"),
    Row(("visual.merger.gate_proj", "visual.merger.up_proj"), "vision.merger_up"),
    Row(("visual.merger.down_proj",), "vision.merger_down"),
)


class GlmVisionTower(BlockTower):
    """Patches -> rows of the decoder's width."""

    config: GlmVisionConfig

    def __init__(self, config: GlmVisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, width, merge = config.hidden_size, config.row_width, config.merge_size
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.patch_norm = RMSNorm(size, config.eps)
        self.positions = Positions(config.side**2, size)
        sizes = size, config.num_heads, width, config.eps, config.qkv_bias
        self.layers = [GatedLayer(*sizes) for _ in range(config.num_layers)]
        self.post_norm = RMSNorm(size, config.eps)
        self.downsample = Linear(size * merge**2, width, bias=True, fold=(size, merge, merge))
        self.merger_in = Linear(width, width)
        self.merger_norm = LayerNorm(width, 1e-5)
        self.merger_up = GatedLinear(width, config.merger_size, bias=False, activation=Activation.SILU)
        self.merger_down = Linear(config.merger_size, width)
        self._tables: Recent[tuple[int, int], Tables] = Recent(MAX_TABLE_ROWS)

    def rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        x = self.patch_norm(self.patch_embed(patches))
        turns, first = [], 0
        for times, height, width in grids:
            cos, sin, places = self._tables_of((height, width))
            last = first + times * height * width
            x[first:last].view(times, height * width, -1).add_(self._interpolated(places))
            turns += [(cos, sin)] * times
            first = last
        cos, sin = (joined(each) for each in zip(*turns))
        yield from layer_by_layer(self.layers, x, frame_bounds(grids, x.device), cos, sin)
        merge = self.config.merge_size
        blocks = self.post_norm(x).view(-1, merge**2, x.shape[1]).transpose(1, 2)  # a channel's patches are adjacent
        rows = self.merger_in(self.downsample(blocks.reshape(-1, self.downsample.in_features)))
        return self.merger_down(self.merger_up(gelu(self.merger_norm(rows))))

    def _tables_of(self, grid: tuple[int, int]) -> Tables:
        known = self._tables.get(grid)
        if known is None:
            known = tables_of(grid, self.config, self.device)
            self._tables.put(grid, known, len(known[0]))
        return known

    def _interpolated(self, places: Tensor) -> Tensor:
        """The learned positions at each patch, bicubic as in training: [patches, hidden]."""
        side, table = self.config.side, self.positions.table
        square = table.view(side, side, -1).permute(2, 0, 1)[None].float()
        found = functional.grid_sample(square, places, mode="bicubic", padding_mode="border", align_corners=False)
        return found[0, :, :, 0].t().to(table.dtype)


def tables_of(grid: tuple[int, int], config: GlmVisionConfig, device: str) -> Tables:
    """A grid's tables, block by block: half of the pairs are rotated by the row, half by the column."""
    height, width = grid
    row, column = by_block(height, width, config.merge_size)
    cos, sin = turns_of(row, column, config.hidden_size // config.num_heads, config.rope_theta)
    places = torch.stack([(column + 0.5) / width * 2 - 1, (row + 0.5) / height * 2 - 1], dim=1)
    return cos.to(device), sin.to(device), places[None, :, None].to(device)
