"""Phi-4-multimodal's vision tower: tiles of 448 x 448 pixels -> rows of the decoder's width.

Thread: device. In: the patches of a picture's tiles, the whole picture first, and each tile's extent, the patches that
the picture covers. The other patches are padding: they are computed, but no patch attends to them. Positions are
fractions of the covered side. In each tile, 2 x 2 neighbours are averaged. Then the rows of all tiles are put into the
order of `places`, with a separator after each line and one before the whole picture, and pass two linear layers.

    [tiles * 1024, 588] -> embed -> layers -> 2 x 2 averages, separators -> up, gelu, down
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.base.errors import ConfigError, RequestError
from engine.base.request import Modality
from engine.checkpoint.section import MAX_LAYERS, Section
from engine.encoders.tower import TOGETHER, Features, PatchTower, Pieces, apart, bounds_of, joined, layer_by_layer
from engine.kernels.activation import BY_NAME, gelu, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.layers.bare import Bare
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm
from engine.weights.table import Row

POOL = 2  # neighbours along a side of the square that becomes one row
# The only supported values, which are the released files'; also the defaults for missing keys.
ONLY: dict[str, Any] = {
    "image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp", "use_hd_transform": True,
    "with_learnable_separator": True, "hd_transform_order": "sub_glb",
}  # fmt: skip
RELEASED = ("sub_GN", "glb_GN")
IMAGE = "embed_tokens_extend.image_embed."
IGNORED = (f"{IMAGE}img_processor.head.*", f"{IMAGE}img_processor.post_layernorm.*", "*.position_ids")


@dataclass(frozen=True, slots=True)
class Phi4VisionConfig:
    """The tower's configuration; missing keys have the published model's values."""

    modalities: ClassVar[tuple[Modality, ...]] = ("image",)
    row_parts: ClassVar[int] = 1

    num_layers: int  # layers that are computed
    left_out: int  # further layers of the checkpoint, which are not computed
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    side: int  # patches along a side of a tile
    eps: float
    activation: str
    separators: tuple[str, str]  # names of the tensors after each line, and before the whole picture
    output_dim: int

    @property
    def row_width(self) -> int:
        return self.output_dim


def read_vision(section: Section) -> Phi4VisionConfig:
    """Reads transformers' vision_config."""
    return _read(section, "sub_img_feature_extensor", "global_img_feature_extensor")


def read_released(section: Section) -> Phi4VisionConfig:
    """Reads embd_layer of Microsoft's files, which name no sizes; the sizes are those of the only published tower."""
    assert section.outer is not None, "a tower's section lies in another one"
    body = section.section("image_embd_layer")
    for key, needed in ONLY.items():
        given = body.values.get(key, needed)
        if given != needed:
            raise ConfigError(f"{body.path}: {key}={given!r}; pictures are supported with {needed!r}")
    sizes = section.outer.values.get("vision_config") or {}
    return _read(Section({**sizes, "crop_size": body.size("crop_size", 448)}, body.path, section.outer), *RELEASED)


def _read(section: Section, *separators: str) -> Phi4VisionConfig:
    assert section.outer is not None, "a tower's section lies in another one"
    size, patch = section.size("image_size", 448), section.size("patch_size", 14)
    depth = section.integer("num_hidden_layers", 27, least=1, most=MAX_LAYERS)
    layers = depth + 1 + section.integer("feature_layer", -2, least=-depth, most=-1)
    config = Phi4VisionConfig(
        num_layers=layers,
        left_out=depth - layers,
        hidden_size=section.size("hidden_size", 1152),
        intermediate_size=section.size("intermediate_size", 4304),
        num_heads=section.size("num_attention_heads", 16),
        patch_size=patch,
        side=size // patch,
        eps=section.number("layer_norm_eps", 1e-6),
        activation=str(section.values.get("hidden_act") or "gelu_pytorch_tanh"),
        separators=(separators[0], separators[1]),
        output_dim=section.outer.size("hidden_size"),
    )
    if section.size("crop_size", 448) != size or size % patch or config.side % POOL:
        raise ConfigError(
            f"{section.path}: image_size={size} must be crop_size={section.size('crop_size', 448)}, and make an even "
            f"number of patches of patch_size={patch}"
        )
    if config.activation not in BY_NAME or config.hidden_size % config.num_heads:
        raise ConfigError(
            f"{section.path}: hidden_act={config.activation!r} must be one of {', '.join(BY_NAME)}, and "
            f"hidden_size={config.hidden_size} a multiple of num_attention_heads={config.num_heads}"
        )
    return config


class Phi4VisionLayer:
    """x += attention(norm(x)); x += mlp(norm(x)); each in its tile."""

    def __init__(self, config: Phi4VisionConfig) -> None:
        size = config.hidden_size
        self.config = config
        self.norm1, self.norm2 = LayerNorm(size, config.eps), LayerNorm(size, config.eps)
        self.qkv = Linear(size, size, size, size, bias=True)
        self.out = Linear(size, size, bias=True)
        self.up = Linear(size, config.intermediate_size, bias=True)
        self.down = Linear(config.intermediate_size, size, bias=True)

    def __call__(self, x: Tensor, bounds: Tensor, visible: Tensor | None) -> None:
        """Adds to x [tiles * patches, hidden]. visible: bool [tiles, patches], False for padding; None: no padding."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3, self.config.num_heads, -1)
        q, k, v = heads.unbind(1)
        if visible is None:
            attended = dense_attention(q, k, v, bounds, q.shape[2] ** -0.5)
        else:
            q, k, v = (part.view(*visible.shape, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
            attended = out.transpose(1, 2).reshape(len(x), -1)
        self.out.add_to(x, attended)
        self.down.add_to(x, pointwise(self.up(self.norm2(x)), BY_NAME[self.config.activation]))


class Phi4VisionTower(PatchTower):
    """Patches of tiles -> rows of the decoder's width."""

    config: Phi4VisionConfig

    def __init__(self, config: Phi4VisionConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, dtype, device)
        size, kernel = config.hidden_size, (3, config.patch_size, config.patch_size)
        self.patch_embed = Linear(torch.Size(kernel).numel(), size, bias=True, fold=kernel)
        self.positions = Bare("weight", config.side**2, size)
        self.layers = [Phi4VisionLayer(config) for _ in range(config.num_layers)]
        line, whole = config.separators
        self.line, self.whole = Bare(line, 1, 1, 1, size), Bare(whole, 1, 1, size)
        self.up = Linear(size, config.output_dim, bias=True)
        self.down = Linear(config.output_dim, config.output_dim, bias=True)

    def example(self, modality: Modality, rows: int) -> Features:
        """Blank tiles; if there are several, the last tile is partly padding."""
        side = self.config.side
        tiles = max(1, rows // (side // POOL) ** 2)
        patches = torch.zeros(tiles * side**2, self.patch_embed.in_features, device=self.device)
        extents = torch.full((tiles, 2), side)
        extents[1:][-1:] = max(1, side - 1)
        places = torch.arange(min(rows, tiles * (side // POOL) ** 2))
        return {"pixel_values": patches, "extents": extents, "places": places}

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [tiles * side^2, numbers], `extents` [tiles, 2] (height and width in patches of
        each tile's covered part), and `places` [rows], indices into the tiles' rows followed by the separators."""
        for features in items:
            self._check(features)
        lengths = [len(features["places"]) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        rows = yield from self._rows(patches, joined([features["extents"] for features in items]))
        separators = torch.cat([self.line.value.view(1, -1), self.whole.value.view(1, -1)])
        own = [len(features["extents"]) * (self.config.side // POOL) ** 2 for features in items]
        placed = [
            torch.cat([part, separators])[features["places"].to(self.device)]
            for part, features in zip(rows.split(own), items)
        ]
        return apart(self.down(gelu(self.up(joined(placed)))), lengths)

    def _rows(self, patches: Tensor, extents: Tensor) -> Generator[float, None, Tensor]:
        """The rows of each tile, tile after tile: [tiles * (side / 2)^2, hidden]. Full tiles run separately, because
        they need no mask."""
        side, size = self.config.side, self.config.hidden_size
        patches = patches.view(len(extents), side**2, -1)
        full = (extents == side).all(1)
        rows = patches.new_empty(len(extents), (side // POOL) ** 2, size)
        for group in (full.nonzero()[:, 0], (~full).nonzero()[:, 0]):
            for tiles in group.split(max(1, TOGETHER // side**2)):
                if len(tiles):
                    index = tiles.to(self.device)
                    rows[index] = yield from self._run(patches[index], extents[tiles])
        return rows.view(-1, size)

    def _run(self, patches: Tensor, extents: Tensor) -> Generator[float, None, Tensor]:
        """patches [tiles, side^2, numbers] -> [tiles, (side / 2)^2, hidden]."""
        tiles, count, _ = patches.shape
        side = self.config.side
        places, visible = positions(extents, side)
        x = self.patch_embed(patches.flatten(0, 1)) + self.positions.value[places.to(self.device).view(-1)]
        bounds = bounds_of([count] * tiles, x.device)
        mask = None if bool(visible.all()) else visible.to(self.device)
        yield from layer_by_layer(self.layers, x, bounds, mask)
        blocks = x.view(tiles, side // POOL, POOL, side // POOL, POOL, -1)
        return blocks.mean((2, 4)).flatten(1, 2)

    def _check(self, features: Features) -> None:
        patches, extents, side = features["pixel_values"], features["extents"], self.config.side
        numbers, most = self.patch_embed.in_features, len(extents) * (side // POOL) ** 2 + 1
        fits = patches.shape == (len(extents) * side**2, numbers) and extents.shape[1:] == (2,) and len(extents)
        if not fits or int(features["places"].max()) > most:
            raise RequestError(
                f"pixel_values {list(patches.shape)} and extents {list(extents.shape)}: {side**2} patches of {numbers} "
                f"numbers for each tile, and places up to {most} are needed"
            )


def positions(extents: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Position indices int64 [tiles, side^2], and which patches the picture covers, bool; extents int64 [tiles, 2]."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    place = torch.arange(side)
    steps = 1.0 / extents.clamp(min=1)  # float32 as in training, because rounding affects the indices
    shares = (place.float() * steps[..., None]).clamp(max=1.0 - 1e-6)  # [tiles, 2, side]
    row, column = torch.bucketize(shares, bounds, right=True).unbind(1)
    visible = (place < extents[..., None]).unbind(1)
    both = (visible[0][:, :, None] & visible[1][:, None]).flatten(1)
    return torch.where(both, (row[:, :, None] * side + column[:, None]).flatten(1), 0), both


def rows() -> tuple[Row, ...]:
    """Weight rows, in the released layout, of a tower at the model's attribute `vision`."""
    tower, target = f"{IMAGE}img_processor.", "vision.layers.*."
    layer = f"{tower}encoder.layers.*."
    attention = f"{layer}self_attn."
    return (
        Row((f"{tower}embeddings.patch_embedding",), "vision.patch_embed"),
        Row((f"{tower}embeddings.position_embedding",), "vision.positions"),
        Row((f"{layer}layer_norm1",), target + "norm1"),
        Row((f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"), target + "qkv"),
        Row((f"{attention}out_proj",), target + "out"),
        Row((f"{layer}layer_norm2",), target + "norm2"),
        Row((f"{layer}mlp.fc1",), target + "up"),
        Row((f"{layer}mlp.fc2",), target + "down"),
        Row((IMAGE[:-1],), "vision.line"),
        Row((IMAGE[:-1],), "vision.whole"),
        Row((f"{IMAGE}img_projection.0",), "vision.up"),
        Row((f"{IMAGE}img_projection.2",), "vision.down"),
    )


def unread(config: Phi4VisionConfig) -> tuple[str, ...]:
    """The checkpoint's tensors that the model does not use: the layers after the last used layer, and a head."""
    behind = range(config.num_layers, config.num_layers + config.left_out)
    return (*IGNORED, *(f"{IMAGE}img_processor.encoder.layers.{number}.*" for number in behind))
