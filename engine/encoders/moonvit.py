"""MoonViT, the vision tower of Kimi-VL: the patches of a picture of any shape -> rows for the decoder.

Thread: device. In: patches row by row, and their grid. Out: a row per block of 2 x 2 patches. Each patch has a learned
position, interpolated to the picture's grid, and rotations: even pairs of a head by the column, odd pairs by the row.
Patches see only the patches of their own picture, so pictures of several requests run together. After the layers and a
norm, two linear layers merge a block's patches. The formulas are those of modeling_kimi_vl.py in
https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct. The tower runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.encoders.vit.parts import side_by_side
from engine.kernels.activation import Activation, gelu, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.rows import half_split
from engine.weights.table import Row

MAX_TABLE_ROWS = 65_536  # patches whose tables are cached
EPS, THETA, LONGEST = 1e-5, 10_000.0, 512  # LONGEST: patches along a side are fewer
Grid = tuple[int, int]  # height, width, in patches
Tables = tuple[Tensor, Tensor, Tensor]  # positions [patches, hidden]; cos, sin [patches, head_dim / 2]


@dataclass(frozen=True, slots=True)
class MoonVitConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    square: Grid  # the grid of the learned positions
    merge_size: int
    row_width: int


def read_vision(section: Section) -> MoonVitConfig:
    """The tower's numbers, checked; rows have the decoder's width."""
    hidden, heads = section.size("hidden_size", 1152), section.size("num_attention_heads", 16)
    merge = section.items("merge_kernel_size", (2, 2))
    if hidden % heads or hidden // heads % 4 or len(merge) != 2 or merge[0] != merge[1]:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} over num_attention_heads={heads} must give heads of a multiple of 4 "
            f"(rotary positions along two axes), and merge_kernel_size={list(merge)} two equal numbers"
        )
    assert section.outer is not None, "a tower's section lies in another one"
    return MoonVitConfig(
        num_layers=section.integer("num_hidden_layers", 27, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=section.size("intermediate_size", 4304),
        num_heads=heads,
        patch_size=section.size("patch_size", 14),
        square=(section.size("init_pos_emb_height", 64), section.size("init_pos_emb_width", 64)),
        merge_size=Section({"merge_kernel_size": merge[0]}, section.path).size("merge_kernel_size"),
        row_width=section.outer.section("text_config").size("hidden_size"),
    )


TOWER, LAYER, TARGET = "vision_tower.", "vision_tower.encoder.blocks.*.", "vision.layers.*."
ROWS = (
    Row((TOWER + "patch_embed.proj",), "vision.patch_embed"),
    Row((TOWER + "patch_embed.pos_emb",), "vision.positions"),
    Row((LAYER + "norm0",), TARGET + "norm1"),
    Row((LAYER + "wqkv",), TARGET + "qkv"),
    Row((LAYER + "wo",), TARGET + "out"),
    Row((LAYER + "norm1",), TARGET + "norm2"),
    Row((LAYER + "mlp.fc0",), TARGET + "up"),
    Row((LAYER + "mlp.fc1",), TARGET + "down"),
    Row((TOWER + "encoder.final_layernorm",), "vision.post_norm"),
    Row(("multi_modal_projector.pre_norm",), "vision.merger_norm"),
    Row(("multi_modal_projector.linear_1",), "vision.merger_in"),
    Row(("multi_modal_projector.linear_2",), "vision.merger_out"),
)


class MoonVitLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: MoonVitConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.head_dim = head = size // config.num_heads
        self.norm1, self.norm2 = LayerNorm(size, EPS), LayerNorm(size, EPS)
        self.qkv = Linear(size, 3 * size, bias=True)

        def arrange(_: int, rows: Tensor) -> Tensor:
            """Rotated pairs are adjacent rows in the file, and rows of the two halves of a head here."""
            return torch.cat([half_split(rows[: 2 * size], head, head), rows[2 * size :]])

        self.qkv.arrange = arrange
        self.out = Linear(size, size, bias=True)
        self.up = Linear(size, inner, bias=True)
        self.down = Linear(inner, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Adds to x [patches, hidden]."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3 * self.num_heads, self.head_dim)
        turned = apply_rope(heads[:, : 2 * self.num_heads], cos, sin)
        q, k, v = turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, 2 * self.num_heads :]
        self.out.add_to(x, dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        self.down.add_to(x, pointwise(self.up(self.norm2(x)), Activation.GELU_TANH))


class MoonVitTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: MoonVitConfig

    def __init__(self, config: MoonVitConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, block = config.hidden_size, config.hidden_size * config.merge_size**2
        kernel = (3, config.patch_size, config.patch_size)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.positions = Bare("weight", *config.square, size)
        self.layers = [MoonVitLayer(config) for _ in range(config.num_layers)]
        self.post_norm = LayerNorm(size, EPS)
        self.merger_norm = LayerNorm(size, EPS)
        self.merger_in = Linear(block, block, bias=True)
        self.merger_out = Linear(block, config.row_width, bias=True)
        self._tables: Recent[Grid, Tables] = Recent(MAX_TABLE_ROWS)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] and `grid` [2]."""
        grids = [self._grid(features) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        rows = yield from self._rows_of(patches, grids)
        return apart(rows, [height * width // self.config.merge_size**2 for height, width in grids])

    def _grid(self, features: Features) -> Grid:
        patches, (height, width) = features["pixel_values"], features["grid"].tolist()
        merge, numbers = self.config.merge_size, self.patch_embed.in_features
        fits = 0 < height < LONGEST and 0 < width < LONGEST and not (height % merge or width % merge)
        if not fits or tuple(patches.shape) != (height * width, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit the grid {height} x {width}: {height * width} patches "
                f"of {numbers} numbers are needed, with sides of multiples of {merge} below {LONGEST}"
            )
        return height, width

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture, about as high as wide; sides stay below LONGEST."""
        merge = self.config.merge_size
        most = (LONGEST - 1) // merge
        height = min(most, math.isqrt(rows))
        grid = height * merge, min(most, rows // height) * merge
        patches = torch.zeros(grid[0] * grid[1], self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid": torch.tensor(grid)}

    def _rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """patches [sum of height * width, numbers] of the tower's dtype -> [blocks, row_width]."""
        places, cos, sin = (joined(each) for each in zip(*map(self._tables_of, grids)))
        x = self.patch_embed(patches) + places
        lengths = [height * width for height, width in grids]
        yield from layer_by_layer(self.layers, x, bounds_of(lengths, x.device), cos, sin)
        x = self.merger_norm(self.post_norm(x))
        parts = zip(x.split(lengths), grids)
        blocks = joined([side_by_side(part.view(1, *grid, -1), self.config.merge_size, False) for part, grid in parts])
        return self.merger_out(gelu(self.merger_in(blocks)))

    def _tables_of(self, grid: Grid) -> Tables:
        known = self._tables.get(grid)
        if known is None:
            square = self.positions.value.permute(2, 0, 1)[None].float()
            found = square if grid == self.config.square else interpolate(square, size=grid, mode="bicubic")
            places = found[0].permute(1, 2, 0).reshape(-1, self.config.hidden_size).to(self.dtype)
            cos, sin = turns_of(grid, self.config.hidden_size // self.config.num_heads)
            known = places, cos.to(self.device), sin.to(self.device)
            self._tables.put(grid, known, len(places))
        return known


def turns_of(grid: Grid, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos, sin [height * width, head_dim / 2] of a picture: even pairs turn by the column, odd pairs by the row."""
    frequency = 1.0 / THETA ** (torch.arange(0, head_dim, 4, dtype=torch.float32) / head_dim)
    row, column = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    angle = torch.stack([axis.reshape(-1, 1) * frequency for axis in (column, row)], dim=2).flatten(1)
    return angle.cos(), angle.sin()
