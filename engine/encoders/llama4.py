"""The vision tower of Llama 4: the patches of square tiles -> rows for the decoder.

Thread: device. In: patches row by row, tile after tile. Out: rows, tile by tile. A tile's patches, followed by a class
token, have learned positions, are rotated by column and row, and see each other. After the layers four neighbours
become one row, which passes two linear layers with an activation after each, and a last linear layer. The tower runs
eagerly.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.tower import Features, PatchTower, Pieces, apart, joined, layer_by_layer
from engine.encoders.vit.parts import side_by_side
from engine.kernels.activation import gelu
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.rows import half_split
from engine.weights.table import Row

EPS = 1e-5  # epsilon of the norms, for any value in the file


@dataclass(frozen=True, slots=True)
class Llama4VisionConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    side: int  # patches along a side of a tile
    merge: int  # neighbours along a side of the square that becomes one row
    inner_size: int  # inner size of the linear layers after the layers
    theta: float
    row_width: int


def read_vision(section: Section) -> Llama4VisionConfig:
    """The tower's numbers, checked."""
    hidden, heads = section.size("hidden_size", 768), section.size("num_attention_heads", 16)
    image, patch, wide = (
        section.size(key, default)
        for key, default in (("image_size", 448), ("patch_size", 14), ("intermediate_size", 5632))
    )
    ratio, side = section.number("pixel_shuffle_ratio", 0.5), image // patch
    merge = round(1 / ratio) if ratio > 0 else 0
    if hidden % heads or hidden // heads % 4 or not merge or abs(merge * ratio - 1) > 1e-6 or side < 1 or side % merge:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} over num_attention_heads={heads} must give heads of a multiple of "
            f"4, and pixel_shuffle_ratio={ratio} one over a whole number that divides the {side} patches along a side"
        )
    inner = [
        section.size(f"{key}", 4096) for key in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    ]
    if wide != hidden * merge**2 or len(set(inner)) > 1:
        raise ConfigError(
            f"{section.path}: intermediate_size={wide} must be hidden_size times {merge**2}, and projector_input_dim, "
            f"projector_output_dim and vision_output_dim one number, got {inner}"
        )
    rope = section.section("rope_parameters") if section.values.get("rope_parameters") else section
    assert section.outer is not None, "a tower's section lies in another one"
    return Llama4VisionConfig(
        num_layers=section.integer("num_hidden_layers", 34, least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=wide,
        num_heads=heads,
        patch_size=patch,
        side=side,
        merge=merge,
        inner_size=inner[0],
        theta=rope.number("rope_theta", 10_000.0),
        row_width=section.outer.section("text_config").size("hidden_size"),
    )


LAYER, TARGET = "vision_model.model.layers.*.", "vision.layers.*."
ATTENTION = LAYER + "self_attn."
ROWS = (
    Row(("vision_model.patch_embedding.linear",), "vision.patch_embed"),
    Row(("vision_model",), "vision.class_token"),
    Row(("vision_model",), "vision.positions"),
    Row(("vision_model.layernorm_pre",), "vision.pre_norm"),
    Row(("vision_model.layernorm_post",), "vision.post_norm"),
    Row((LAYER + "input_layernorm",), TARGET + "norm1"),
    Row((ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"), TARGET + "qkv"),
    Row((ATTENTION + "o_proj",), TARGET + "out"),
    Row((LAYER + "post_attention_layernorm",), TARGET + "norm2"),
    Row((LAYER + "mlp.fc1",), TARGET + "up"),
    Row((LAYER + "mlp.fc2",), TARGET + "down"),
    Row(("vision_model.vision_adapter.mlp.fc1",), "vision.first"),
    Row(("vision_model.vision_adapter.mlp.fc2",), "vision.second"),
    Row(("multi_modal_projector.linear_1",), "vision.projection"),
)


class Llama4VisionLayer:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: Llama4VisionConfig) -> None:
        size, values = config.hidden_size, 2
        self.num_heads, self.head_dim = config.num_heads, size // config.num_heads
        self.norm1, self.norm2 = LayerNorm(size, EPS), LayerNorm(size, EPS)
        self.qkv = Linear(size, size, size, size, bias=True)
        self.qkv.arrange = lambda number, rows: (
            rows if number == values else half_split(rows, self.head_dim, self.head_dim)
        )
        self.out = Linear(size, size, bias=True)
        self.up = Linear(size, config.intermediate_size, bias=True)
        self.down = Linear(config.intermediate_size, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Adds to x [rows, hidden]."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3 * self.num_heads, self.head_dim)
        turned = apply_rope(heads[:, : 2 * self.num_heads], cos, sin)
        q, k, v = turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, 2 * self.num_heads :]
        self.out.add_to(x, dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        self.down.add_to(x, gelu(self.up(self.norm2(x))))


class Llama4VisionTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: Llama4VisionConfig

    def __init__(self, config: Llama4VisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, inner = config.hidden_size, config.inner_size
        self.patch_embed = Linear(3 * config.patch_size**2, size)
        self.class_token = Bare("class_embedding", size)
        self.positions = Bare("positional_embedding_vlm", config.side**2 + 1, size)
        self.pre_norm, self.post_norm = LayerNorm(size, EPS), LayerNorm(size, EPS)
        self.layers = [Llama4VisionLayer(config) for _ in range(config.num_layers)]
        self.first = Linear(size * config.merge**2, inner)
        self.second = Linear(inner, inner)
        self.projection = Linear(inner, config.row_width)
        self._cos, self._sin = turns(config, device)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [tiles * side^2, numbers]."""
        patches = [self._patches(features) for features in items]
        rows = yield from self._rows_of(joined(patches))
        return apart(rows, [len(each) // self.config.merge**2 for each in patches])

    def _patches(self, features: Features) -> Tensor:
        patches, count, numbers = features["pixel_values"], self.config.side**2, self.patch_embed.in_features
        if not len(patches) or len(patches) % count or patches.shape[1:] != (numbers,):
            raise RequestError(
                f"pixel_values {list(patches.shape)}: tiles of {count} patches of {numbers} numbers are needed"
            )
        return patches.to(self.device, self.dtype)

    def example(self, modality: Modality, rows: int) -> Features:
        """Blank tiles, at least one."""
        side, merge = self.config.side, self.config.merge
        tiles = max(1, rows // (side // merge) ** 2)
        return {"pixel_values": torch.zeros(tiles * side**2, self.patch_embed.in_features, device=self.device)}

    def _rows_of(self, patches: Tensor) -> Generator[float, None, Tensor]:
        """patches [tiles * side^2, numbers] of the tower's dtype -> [rows, row_width]."""
        side, size = self.config.side, self.config.hidden_size
        x = self.patch_embed(patches).view(-1, side**2, size)
        tiles, count = len(x), side**2 + 1
        x = torch.cat([x, self.class_token.value.expand(tiles, 1, size)], 1) + self.positions.value
        x = self.pre_norm(x.view(tiles * count, size))
        bounds = torch.arange(0, tiles * count + 1, count, dtype=torch.int32, device=x.device)
        cos, sin = self._cos.repeat(tiles, 1), self._sin.repeat(tiles, 1)
        yield from layer_by_layer(self.layers, x, bounds, cos, sin)
        x = self.post_norm(x).view(tiles, count, size)[:, :-1].reshape(tiles, side, side, size)
        rows = gelu(self.first(side_by_side(x, self.config.merge, channels_first=False)))
        return self.projection(gelu(self.second(rows)))


def turns(config: Llama4VisionConfig, device: str) -> tuple[Tensor, Tensor]:
    """cos, sin [side^2 + 1, head_dim / 2]: half of the pairs are rotated by the column, half by the row, counted from
    1; the class token is not rotated."""
    half = config.hidden_size // config.num_heads // 2
    inv_freq = 1.0 / config.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    row, column = torch.meshgrid(*(torch.arange(1, config.side + 1) for _ in range(2)), indexing="ij")
    angle = torch.cat([place.reshape(-1, 1) * inv_freq for place in (column, row)], 1)
    angle = torch.cat([angle, angle.new_zeros(1, half)]).to(device)
    return angle.cos(), angle.sin()
