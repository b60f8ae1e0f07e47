"""The vision tower of HunyuanOCR: the patches of pictures of any size -> rows for the decoder.

Thread: device. In: patches row by row, and their grid. Out: for each picture a begin row, a row per block of merge x
merge patches, a newline row after every line of blocks, and an end row. Learned positions form a square and are
interpolated to the picture's grid. Patches see only the patches of their own picture, so pictures of several requests
run together. After the layers two linear layers with an activation between them merge a block's patches. The tower
runs eagerly.

    begin | block block block newline | block block block newline | end
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.encoders.vit.parts import side_by_side
from engine.kernels.activation import BY_NAME, Activation, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.layers.bare import Bare
from engine.layers.embed import Positions
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.weights.table import Row

MAX_TABLE_ROWS = 65_536  # patches whose tables are cached
Grid = tuple[int, int]  # height, width, in patches
Taps = tuple[Tensor, Tensor]  # indices of the 4 learned positions around each patch, int64 [patches, 4]; their weights


@dataclass(frozen=True, slots=True)
class HunYuanVisionConfig:
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
    side: int  # learned positions form a square of side x side
    max_patches: int  # most patches of a picture
    activation: Activation
    eps: float
    row_width: int


def read_vision(section: Section) -> HunYuanVisionConfig:
    """The tower's configuration, checked; rows have the decoder's width, for any value in the section."""
    words = (("hidden_act", "gelu"), ("interpolate_mode", ""))
    act, mode = (str(section.values.get(key) or usual) for key, usual in words)
    if act not in BY_NAME or mode not in ("", "bilinear"):
        raise ConfigError(
            f"{section.path}: hidden_act={act!r}, interpolate_mode={mode!r}; supported are {', '.join(BY_NAME)}, and "
            "'bilinear'"
        )
    hidden, heads = section.size("hidden_size", 1152), section.size("num_attention_heads", 16)
    patch, image = section.size("patch_size", 16), section.size("max_image_size", 2048)
    if hidden % heads or image < patch or section.size("temporal_patch_size", 1) != 1:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} must be a multiple of num_attention_heads={heads}, "
            f"max_image_size={image} at least patch_size={patch}, and temporal_patch_size 1"
        )
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    decoder = outer.section("text_config") if "text_config" in outer.values else outer
    return HunYuanVisionConfig(
        num_layers=section.integer("num_hidden_layers", 27, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=section.size("intermediate_size", 4304),
        num_heads=heads,
        in_channels=section.size("num_channels", 3),
        patch_size=patch,
        merge_size=section.size("spatial_merge_size", 2),
        side=image // patch,
        max_patches=section.integer("max_vit_seq_len", 16_384, least=section.size("spatial_merge_size", 2) ** 2),
        activation=BY_NAME[act],
        eps=section.number("rms_norm_eps", 1e-5),
        row_width=decoder.size("hidden_size"),
    )


LAYER, TARGET, MERGER = "vit.layers.*.", "vision.layers.*.", "vit.perceive"
ROWS = (
    Row(("vit.embeddings.patch_embedding",), "vision.patch_embed"),
    Row(("vit.embeddings.position_embedding",), "vision.positions"),
    Row((LAYER + "input_layernorm",), TARGET + "norm1"),
    Row(tuple(f"{LAYER}self_attn.{which}_proj" for which in "qkv"), TARGET + "qkv"),
    Row((LAYER + "self_attn.o_proj",), TARGET + "out"),
    Row((LAYER + "post_attention_layernorm",), TARGET + "norm2"),
    Row((LAYER + "mlp.dense_h_to_4h",), TARGET + "up"),
    Row((LAYER + "mlp.dense_4h_to_h",), TARGET + "down"),
    Row((MERGER + ".before_rms",), "vision.before"),
    Row((MERGER + ".proj.0",), "vision.block_in"),
    Row((MERGER + ".proj.2",), "vision.block_out"),
    Row((MERGER + ".mlp",), "vision.project"),
    Row((MERGER + ".after_rms",), "vision.after"),
    Row((MERGER,), "vision.newline"),
    Row((MERGER,), "vision.begin"),
    Row((MERGER,), "vision.end"),
)
UNREAD = (MERGER + ".image_sep",)


class HunYuanVisionLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: HunYuanVisionConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.head_dim = size // config.num_heads
        self.activation = config.activation
        self.norm1 = LayerNorm(size, config.eps)
        self.norm2 = LayerNorm(size, config.eps)
        self.qkv = Linear(size, size, size, size, bias=True)
        self.out = Linear(size, size, bias=True)
        self.up = Linear(size, inner, bias=True)
        self.down = Linear(inner, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor) -> None:
        """Adds to x [patches, hidden]; `bounds`: where pictures begin."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3, self.num_heads, self.head_dim)
        q, k, v = heads.unbind(1)
        self.out.add_to(x, dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        self.down.add_to(x, pointwise(self.up(self.norm2(x)), self.activation))


class HunYuanVisionTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: HunYuanVisionConfig

    def __init__(self, config: HunYuanVisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, width, merge = config.hidden_size, config.row_width, config.merge_size
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.positions = Positions(config.side**2, size, offset=1)  # the first position is a class token's
        self.layers = [HunYuanVisionLayer(config) for _ in range(config.num_layers)]
        self.before = RMSNorm(size, config.eps)
        self.block_in = Linear(size * merge**2, 2 * size, bias=True, fold=(size, merge, merge))
        self.block_out = Linear(2 * size, 4 * size, bias=True, fold=(2 * size, 1, 1))
        self.newline = Bare("image_newline", 4 * size)
        self.project = Linear(4 * size, width, bias=True)
        self.begin = Bare("image_begin", width)
        self.end = Bare("image_end", width)
        self.after = RMSNorm(width, config.eps)
        self._taps: Recent[Grid, Taps] = Recent(MAX_TABLE_ROWS)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] and `grid_thw` [1, 3]."""
        grids = [self._grid(features) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        merge = self.config.merge_size
        rows = yield from self._rows_of(patches, grids)
        return apart(rows, [num_rows(height // merge, width // merge) for height, width in grids])

    def _grid(self, features: Features) -> Grid:
        patches, (times, height, width) = features["pixel_values"], features["grid_thw"].reshape(-1).tolist()
        merge, numbers = self.config.merge_size, self.patch_embed.in_features
        fits = times == 1 and min(height, width) > 0 and not (height % merge or width % merge)
        fits &= height * width <= self.config.max_patches
        if not fits or tuple(patches.shape) != (height * width, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit the grid {times} x {height} x {width}: one picture of "
                f"{height * width} patches of {numbers} numbers is needed, with sides of multiples of {merge} and at "
                f"most {self.config.max_patches} patches"
            )
        return height, width

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture, about as high as wide; it may have fewer than `rows` rows, because max_patches bounds it."""
        merge = self.config.merge_size
        side = math.isqrt(self.config.max_patches) // merge
        rows = min(rows, num_rows(side, side))
        height = min(side, max(1, math.isqrt(max(rows - 2, 1))))
        grid = 1, height * merge, max(1, (rows - 2) // height - 1) * merge
        patches = torch.zeros(grid[1] * grid[2], self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid_thw": torch.tensor([grid])}

    def _rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """patches [sum of height * width, numbers] of the tower's dtype -> [rows, row_width]."""
        x = self.patch_embed(patches)
        lengths = [height * width for height, width in grids]
        for part, grid in zip(x.split(lengths), grids):
            part += self._interpolated(grid).to(x.dtype)
        bounds = bounds_of(lengths, x.device)
        yield from layer_by_layer(self.layers, x, bounds)
        x, merge = self.before(x), self.config.merge_size
        blocks = joined(
            [
                side_by_side(part.view(1, *grid, -1), merge, channels_first=True)
                for part, grid in zip(x.split(lengths), grids)
            ]
        )
        blocks = self.block_out(pointwise(self.block_in(blocks), self.config.activation))
        lines = [(height // merge, width // merge) for height, width in grids]
        cells = joined(
            [
                torch.cat([part.view(*line, -1), self.newline.value.expand(line[0], 1, -1)], dim=1).flatten(0, 1)
                for part, line in zip(blocks.split([length // merge**2 for length in lengths]), lines)
            ]
        )
        begin, end = self.begin.value[None], self.end.value[None]
        parts = self.project(cells).split([num_rows(*line) - 2 for line in lines])
        return self.after(torch.cat([piece for part in parts for piece in (begin, part, end)]))

    def _interpolated(self, grid: Grid) -> Tensor:
        """The position of each patch, a weighted sum of four learned positions: [patches, hidden] float32."""
        known = self._taps.get(grid)
        if known is None:
            places, shares = taps_of(grid, self.config.side)
            known = (places + self.positions.offset).to(self.device), shares.to(self.device)
            self._taps.put(grid, known, len(places))
        places, shares = known
        total = functional.embedding(places[:, 0], self.positions.table) * shares[:, :1]
        for tap in range(1, places.shape[1]):
            total += functional.embedding(places[:, tap], self.positions.table) * shares[:, tap, None]
        return total


def num_rows(height: int, width: int) -> int:
    """Rows of a picture of height x width blocks, including newlines, begin row and end row."""
    return height * (width + 1) + 2


def taps_of(grid: Grid, side: int) -> Taps:
    """For each patch, row by row: the four surrounding places in a square of `side`, and their weights.

    Bilinear; the outer edges of the grid coincide with those of the square, and places are clamped at the edges.
    """
    axes = []
    for size in grid:
        at = ((torch.arange(size, dtype=torch.float32) + 0.5) * (side / size) - 0.5).clamp(min=0)
        low = at.floor().long().clamp(max=side - 1)
        share = at - low
        axes.append((torch.stack([low, (low + 1).clamp(max=side - 1)], 1), torch.stack([1 - share, share], 1)))
    (rows, row_shares), (columns, column_shares) = axes
    places = rows[:, None, :, None] * side + columns[None, :, None, :]  # [height, width, 2, 2]
    shares = row_shares[:, None, :, None] * column_shares[None, :, None, :]
    return places.reshape(-1, 4), shares.reshape(-1, 4)
