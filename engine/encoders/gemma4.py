"""The vision tower of Gemma 4: patches of a picture, or of a video's frames -> rows for the decoder.

Thread: device. In: patches row by row, frame after frame, and the grid of each item. Out: a row for each square of
pool x pool patches. A patch has a learned position for its column and another for its row, and heads are rotated by
both. All patches of a picture or frame see each other. Queries, keys and values are normalised, and scores are not
scaled. In the small models the inputs and outputs of linear layers are clamped to bounds in the checkpoint. After
the layers a square's patches are averaged. Pictures of several requests run together. The tower runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.recent import Recent
from engine.encoders.tower import Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import BY_NAME, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.gemm.pack import Placement
from engine.kernels.norm import rms_norm
from engine.kernels.rotate import apply_rope
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.weights.table import Row, Wanted

MAX_TABLE_ROWS = 65_536  # patches whose tables are cached
Grid = tuple[int, int]
Turns = tuple[Tensor, Tensor]  # cos, sin [patches, head_dim / 2]


@dataclass(frozen=True, slots=True)
class Gemma4VisionConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch_size: int
    num_positions: int  # along each side
    pool: int  # patches along a side of the square that becomes one row
    activation: str
    eps: float
    theta: float
    clipped: bool
    standardised: bool  # rows are shifted and scaled by std_bias and std_scale of the checkpoint
    row_width: int


def read_vision(section: Section) -> Gemma4VisionConfig:
    """The tower's numbers, checked."""
    act = str(section.values.get("hidden_activation") or "gelu_pytorch_tanh")
    if act not in BY_NAME:
        raise ConfigError(f"{section.path}: hidden_activation={act!r}; supported are {', '.join(BY_NAME)}")
    heads, head_dim = section.size("num_attention_heads", 12), section.size("head_dim", 64)
    kv_heads = section.size("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 4:
        raise ConfigError(
            f"{section.path}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}, and "
            f"head_dim={head_dim} of 4 (rotary positions along two axes)"
        )
    if section.boolean("attention_bias", False):
        raise ConfigError(f"{section.path}: attention_bias=true is not supported; supported is false")
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    assert section.outer is not None, "a tower's section lies in another one"
    return Gemma4VisionConfig(
        num_layers=section.integer("num_hidden_layers", 16, least=1, most=MAX_LAYERS),
        hidden_size=section.size("hidden_size", 768),
        intermediate_size=section.size("intermediate_size", 3072),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        patch_size=section.size("patch_size", 16),
        num_positions=section.size("position_embedding_size", 10_240),
        pool=section.size("pooling_kernel_size", 3),
        activation=act,
        eps=section.number("rms_norm_eps", 1e-6),
        theta=rope.number("rope_theta", 100.0),
        clipped=section.boolean("use_clipped_linears", False),
        standardised=section.boolean("standardize", False),
        row_width=section.outer.section("text_config").size("hidden_size"),
    )


def bounded(layer: str, target: str, products: Mapping[str, str]) -> tuple[Row, ...]:
    """Weight rows of linear layers with bounds; `products`: part -> module."""
    return tuple(
        row
        for part, module in products.items()
        for row in (
            Row((f"{layer}{module}.linear",), f"{target}{part}.linear"),
            Row((layer + module,), f"{target}{part}.bounds"),
        )
    )


LAYER, TARGET = "vision_tower.encoder.layers.*.", "vision.layers.*."
PRODUCTS = {  # part -> module
    **{f"{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
ROWS = (
    Row(("vision_tower.patch_embedder.input_proj",), "vision.patch_embed"),
    Row(("vision_tower.patch_embedder",), "vision.positions"),
    Row(("vision_tower",), "vision.standard"),
    *bounded(LAYER, TARGET, PRODUCTS),
    Row((LAYER + "self_attn.q_norm",), TARGET + "q_norm"),
    Row((LAYER + "self_attn.k_norm",), TARGET + "k_norm"),
    Row((LAYER + "input_layernorm",), TARGET + "norm1"),
    Row((LAYER + "post_attention_layernorm",), TARGET + "norm1_behind"),
    Row((LAYER + "pre_feedforward_layernorm",), TARGET + "norm2"),
    Row((LAYER + "post_feedforward_layernorm",), TARGET + "norm2_behind"),
    Row(("embed_vision.embedding_projection",), "vision.projection"),
)


class Numbers:
    """Tensors of one shape that a checkpoint's module has in addition to its weight."""

    __slots__ = ("kinds", "shape", "values")

    values: dict[str, Tensor]

    def __init__(self, kinds: tuple[str, ...], *shape: int) -> None:
        self.kinds = kinds
        self.shape = shape

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {kind: (Wanted(self.shape),) for kind in self.kinds}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        found = {kind: pieces[kind][0] for kind in self.kinds}
        self.values = {
            kind: piece.to(placement.device, torch.float32, copy=True)
            for kind, piece in found.items()
            if piece is not None
        }


class Clipped:
    """x W^T; inputs and outputs are clamped if the checkpoint has bounds."""

    def __init__(self, clipped: bool, in_features: int, out_features: int) -> None:
        self.linear = Linear(in_features, out_features)
        kinds = ("input_min", "input_max", "output_min", "output_max")
        self.bounds = Numbers(kinds) if clipped else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return self.linear(x)
        low, high, least, most = (self.bounds.values[kind].to(x.dtype) for kind in self.bounds.kinds)
        return self.linear(x.clamp(low, high)).clamp_(least, most)


class TurnedNorm(RMSNorm):
    """The norm of heads whose values are in the order of `by_pairs`."""

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        super().fill(pieces, placement)
        self.weight = by_pairs(self.weight, self.size)


def by_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] -> in each head the first values of all rotated pairs, then the second values.

    In checkpoints one half of a head is rotated by the column and the other half by the row; each half is again split
    into first and second values.
    """
    return rows.unflatten(0, (-1, 2, 2, head_dim // 4)).transpose(1, 2).flatten(0, 3).contiguous()


class Gemma4VisionMLP:
    """down(act(gate(x)) * up(x)), with clamped linear layers."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        size, wide = config.hidden_size, config.intermediate_size
        self.activation = BY_NAME[config.activation]
        self.gate, self.up = Clipped(config.clipped, size, wide), Clipped(config.clipped, size, wide)
        self.down = Clipped(config.clipped, wide, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [patches, hidden] -> [patches, hidden]."""
        return self.down(pointwise(self.gate(x), self.activation).mul_(self.up(x)))


class Gemma4VisionLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma4VisionConfig, ones: Tensor) -> None:
        size, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.eps, self.ones = head_dim, config.eps, ones
        self.q, self.k, self.v = (
            Clipped(config.clipped, size, heads * head_dim) for heads in (config.num_heads, *(config.num_kv_heads,) * 2)
        )
        for product in (self.q, self.k):
            product.linear.arrange = lambda _, rows: by_pairs(rows, head_dim)
        self.q_norm, self.k_norm = TurnedNorm(head_dim, config.eps), TurnedNorm(head_dim, config.eps)
        self.o = Clipped(config.clipped, config.num_heads * head_dim, size)
        self.mlp = Gemma4VisionMLP(config)
        self.norm1, self.norm1_behind, self.norm2, self.norm2_behind = (RMSNorm(size, config.eps) for _ in range(4))

    def __call__(self, x: Tensor, bounds: Tensor, turns: Turns) -> None:
        """Adds to x [patches, hidden]."""
        read = self.norm1(x)
        q, k, v = (product(read).unflatten(1, (-1, self.head_dim)) for product in (self.q, self.k, self.v))
        q, k = (apply_rope(part, *turns, norm.weight, self.eps) for part, norm in ((q, self.q_norm), (k, self.k_norm)))
        attended = dense_attention(q, k, rms_norm(v, self.ones, self.eps), bounds, 1.0)
        x += self.norm1_behind(self.o(attended))
        x += self.norm2_behind(self.mlp(self.norm2(x)))


class Gemma4VisionTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: Gemma4VisionConfig

    def __init__(self, config: Gemma4VisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size = config.hidden_size
        self.patch_embed = Linear(3 * config.patch_size**2, size)
        self.positions = Bare("position_embedding_table", 2, config.num_positions, size)
        ones = torch.ones(config.head_dim, device=device)  # weights of a norm without weights, as self.ones
        self.layers = [Gemma4VisionLayer(config, ones) for _ in range(config.num_layers)]
        self.standard = Numbers(("std_bias", "std_scale"), size) if config.standardised else None
        self.ones = torch.ones(size, device=device)
        self.projection = Linear(size, config.row_width)
        self._turns: Recent[Grid, Turns] = Recent(MAX_TABLE_ROWS)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] from 0 to 1, channel by channel, and a frame's `grid` [2]."""
        grids = [grid for features in items for grid in self._grids(features)]
        patches = joined([features["pixel_values"].to(self.device) for features in items])
        side, unit = self.config.patch_size, self.config.pool**2
        pixels = patches.view(-1, 3, side, side).permute(0, 2, 3, 1).reshape(len(patches), -1)
        rows = yield from self._rows_of((pixels - 0.5).mul_(2.0).to(self.dtype), grids)
        return apart(rows, [len(features["pixel_values"]) // unit for features in items])

    def _grids(self, features: Features) -> list[Grid]:
        """The grid of each frame; a picture has one frame."""
        patches, (height, width) = features["pixel_values"], features["grid"].reshape(-1).tolist()
        numbers, pool, most = self.patch_embed.in_features, self.config.pool, self.config.num_positions
        fits = min(height, width) > 0 and max(height, width) <= most and not (height % pool or width % pool)
        if not fits or patches.shape[1:] != (numbers,) or not len(patches) or len(patches) % (height * width):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit the grid {height} x {width}: a patch of {numbers} "
                f"numbers for each place is needed, with sides of multiples of {pool} up to {most}"
            )
        return [(height, width)] * (len(patches) // (height * width))

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture, about as high as wide; if the learned positions do not suffice, frames of a video."""
        pool, most = self.config.pool, self.config.num_positions // self.config.pool
        height = min(math.isqrt(rows), most)
        width = min(rows // height, most)
        grid = height * pool, width * pool
        frames = rows // (height * width)
        patches = torch.zeros(frames * grid[0] * grid[1], self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid": torch.tensor(grid)}

    def _rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """patches [sum of height * width, numbers] of the tower's dtype -> [squares, row_width]."""
        columns, rows = self.positions.value
        places = [(columns[None, :width] + rows[:height, None]).flatten(0, 1) for height, width in grids]
        x = self.patch_embed(patches) + joined(places)
        lengths = [height * width for height, width in grids]
        bounds = bounds_of(lengths, x.device)
        cos, sin = zip(*(self._turned(grid) for grid in grids))
        turns = joined(cos), joined(sin)
        yield from layer_by_layer(self.layers, x, bounds, turns)
        squares = joined([self._squares(part, grid) for part, grid in zip(x.split(lengths), grids)])
        found = squares.float() * self.config.hidden_size**0.5  # values beyond the range of float16
        if self.standard is not None:
            found = (found - self.standard.values["std_bias"]) * self.standard.values["std_scale"]
        return self.projection(rms_norm(found.to(self.dtype), self.ones, self.config.eps))

    def _squares(self, x: Tensor, grid: Grid) -> Tensor:
        """x [height * width, hidden] -> the averages of squares, [height * width / pool^2, hidden]."""
        (height, width), pool = grid, self.config.pool
        return x.float().view(height // pool, pool, width // pool, pool, -1).mean((1, 3)).flatten(0, 1).to(x.dtype)

    def _turned(self, grid: Grid) -> Turns:
        """cos and sin of a grid: half of the pairs are rotated by the column, half by the row."""
        known = self._turns.get(grid)
        if known is None:
            half = self.config.head_dim // 2
            inv_freq = 1.0 / self.config.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
            row, column = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
            angle = torch.cat([place.reshape(-1, 1) * inv_freq for place in (column, row)], 1).to(self.device)
            known = angle.cos(), angle.sin()
            self._turns.put(grid, known, len(angle))
        return known
