"""The vision tower of GLM-4V (EVA2-CLIP-E): the patches of a square picture -> rows for the decoder.

Thread: device. In: a fixed number of patches, row by row. Out: a begin row, a row per block of 2 x 2 patches, and an
end row, all divided by scaling_factor. A class token passes the layers and makes no row. Each layer normalises the
outputs of attention and MLP, not their inputs. After the layers a linear layer merges a block's patches, and a gated
MLP follows. Names and formulas follow visual.py in https://huggingface.co/THUDM/glm-4v-9b, which is not executed. The
tower runs eagerly; pictures of several requests run together.
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
from engine.encoders.tower import Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.encoders.vit.parts import side_by_side
from engine.kernels.activation import BY_NAME, Activation, gelu, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.layers.bare import Bare
from engine.layers.embed import Positions
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

MERGE = 2  # patches along a side of the block that becomes one row


@dataclass(frozen=True, slots=True)
class EvaClipConfig:
    """The tower's numbers."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    row_parts: ClassVar[int] = 1

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    side: int  # patches along a side of every picture
    activation: Activation
    eps: float
    row_width: int
    merger_size: int  # inner size of the MLP after the layers
    scaling_factor: float  # rows are divided by it

    @property
    def num_rows(self) -> int:
        """Rows of a picture."""
        return (self.side // MERGE) ** 2 + 2


def read_vision(section: Section) -> EvaClipConfig:
    """The tower's configuration, checked; the parts after the layers have the decoder's width."""
    act = str(section.values.get("hidden_act") or "gelu")
    if act not in BY_NAME:
        raise ConfigError(f"{section.path}: hidden_act={act!r}; supported are {', '.join(BY_NAME)}")
    hidden, heads = section.size("hidden_size"), section.size("num_heads")
    patch, image = section.size("patch_size"), section.size("image_size")
    side, places = image // patch, section.size("num_positions")
    if hidden % heads or not side or side % MERGE or places != side**2 + 1:
        raise ConfigError(
            f"{section.path}: hidden_size={hidden} must be a multiple of num_heads={heads}, the {side} patches of "
            f"{patch} pixels along image_size={image} an even number, and num_positions={places} one more than the "
            "patches of a picture"
        )
    factor = section.number("scaling_factor")
    if factor <= 0:
        raise ConfigError(f"{section.path}: scaling_factor={factor} must be larger than 0")
    outer = section.outer
    assert outer is not None, "a tower's section lies in another one"
    return EvaClipConfig(
        num_layers=section.integer("num_hidden_layers", least=1, most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=section.size("intermediate_size"),
        num_heads=heads,
        in_channels=section.size("in_channels", 3),
        patch_size=patch,
        side=side,
        activation=BY_NAME[act],
        eps=section.number("layer_norm_eps", 1e-6),
        row_width=outer.size("hidden_size"),
        merger_size=outer.size("ffn_hidden_size"),
        scaling_factor=factor,
    )


LAYER, TARGET, MERGER = "vision.transformer.layers.*.", "vision.layers.*.", "vision.linear_proj."
ROWS = (
    Row(("vision.patch_embedding.proj",), "vision.patch_embed"),
    Row(("vision.patch_embedding",), "vision.class_token"),
    Row(("vision.patch_embedding.position_embedding",), "vision.positions"),
    Row((LAYER + "attention.query_key_value",), TARGET + "qkv"),
    Row((LAYER + "attention.dense",), TARGET + "out"),
    Row((LAYER + "input_layernorm",), TARGET + "norm1"),
    Row((LAYER + "mlp.fc1",), TARGET + "up"),
    Row((LAYER + "mlp.fc2",), TARGET + "down"),
    Row((LAYER + "post_attention_layernorm",), TARGET + "norm2"),
    Row(("vision.conv",), "vision.downsample"),
    Row((MERGER + "linear_proj",), "vision.merger_in"),
    Row((MERGER + "norm1",), "vision.merger_norm"),
    Row((MERGER + "gate_proj", MERGER + "dense_h_to_4h"), "vision.merger_up"),
    Row((MERGER + "dense_4h_to_h",), "vision.merger_down"),
    Row(("vision",), "vision.begin"),
    Row(("vision",), "vision.end"),
)


class EvaClipLayer:
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, config: EvaClipConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.head_dim = size // config.num_heads
        self.activation = config.activation
        self.qkv = Linear(size, 3 * size, bias=True)
        self.out = Linear(size, size, bias=True)
        self.norm1 = LayerNorm(size, config.eps)
        self.up = Linear(size, inner, bias=True)
        self.down = Linear(inner, size, bias=True)
        self.norm2 = LayerNorm(size, config.eps)

    def __call__(self, x: Tensor, bounds: Tensor) -> None:
        """Adds to x [patches and class tokens, hidden]; `bounds`: where pictures begin."""
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        attended = self.out(dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        x += self.norm1(attended)
        x += self.norm2(self.down(pointwise(self.up(x), self.activation)))


class EvaClipTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: EvaClipConfig

    def __init__(self, config: EvaClipConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, width = config.hidden_size, config.row_width
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.class_token = Bare("cls_embedding", 1, size)
        self.positions = Positions(config.side**2, size, offset=1)  # the first position is the class token's
        self.layers = [EvaClipLayer(config) for _ in range(config.num_layers)]
        self.downsample = Linear(size * MERGE**2, width, bias=True, fold=(size, MERGE, MERGE))
        self.merger_in = Linear(width, width)
        self.merger_norm = LayerNorm(width, 1e-5)
        self.merger_up = GatedLinear(width, config.merger_size, bias=False, activation=Activation.SILU)
        self.merger_down = Linear(config.merger_size, width)
        self.begin = Bare("boi", 1, 1, width)
        self.end = Bare("eoi", 1, 1, width)

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers of a patch]."""
        wanted = self.config.side**2, self.patch_embed.in_features
        for features in items:
            if tuple(features["pixel_values"].shape) != wanted:
                raise RequestError(
                    f"pixel_values {list(features['pixel_values'].shape)}: one picture of {wanted[0]} patches of "
                    f"{wanted[1]} numbers is needed"
                )
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        rows = yield from self._rows_of(patches, len(items))
        return apart(rows, [self.config.num_rows] * len(items))

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture; all pictures have the same size."""
        return {"pixel_values": torch.zeros(self.config.side**2, self.patch_embed.in_features, device=self.device)}

    def _rows_of(self, patches: Tensor, count: int) -> Generator[float, None, Tensor]:
        """patches [count * side^2, numbers] of the tower's dtype -> [count * num_rows, row_width]."""
        side, size, width = self.config.side, self.config.hidden_size, self.config.row_width
        token = self.class_token.value.expand(count, 1, size)
        x = torch.cat([token, self.patch_embed(patches).view(count, side**2, size)], dim=1)
        x += self.positions.table
        x = x.view(-1, size)
        yield from layer_by_layer(self.layers, x, bounds_of([side**2 + 1] * count, x.device))
        squares = x.view(count, -1, size)[:, 1:].reshape(count, side, side, size)
        rows = self.merger_in(self.downsample(side_by_side(squares, MERGE, channels_first=True)))
        rows = self.merger_down(self.merger_up(gelu(self.merger_norm(rows)))).view(count, -1, width)
        begin, end = (each.value.expand(count, 1, width) for each in (self.begin, self.end))
        return torch.cat([begin, rows, end], dim=1).view(-1, width).div_(self.config.scaling_factor)
