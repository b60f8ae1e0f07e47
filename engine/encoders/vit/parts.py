"""The parts of the plain vision transformer: a layer, and the projector after the layers.

Thread: device. In: x [rows, hidden], changed in place by layers. Out: the projector's rows, of the decoder's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.encoders.tower import joined
from engine.encoders.vit.config import VitConfig
from engine.encoders.vit.names import NAMES
from engine.kernels.activation import pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.gemm.pack import Placement
from engine.kernels.projection_norm import normalise_projections
from engine.kernels.rotate import apply_rope
from engine.layers.bare import Bare
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import LayerNorm, Norm, RMSNorm
from engine.weights.table import Wanted

Rotations = tuple[Tensor, Tensor]  # cos, sin, [rows, head_dim / 2]
Run = tuple[int, int, int]  # tiles of an item, and the height and width of each in patches
Ending = Callable[[Tensor, Sequence[Run]], Tensor]  # the layers' rows of these runs -> rows for the decoder


def vit_norm(config: VitConfig) -> Norm:
    """A LayerNorm or an RMSNorm, as the config says."""
    return RMSNorm(config.hidden_size, config.eps) if config.rms_norm else LayerNorm(config.hidden_size, config.eps)


class VitLayer:
    """x += attention(norm(x)); x += mlp(norm(x)); each in its segment."""

    def __init__(self, config: VitConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        self.head_dim = size // config.num_heads
        self.activation = config.activation
        self.norm1 = vit_norm(config)
        self.norm2 = vit_norm(config)
        self.qkv = Linear(size, *((3 * size,) if config.joined_qkv else (size,) * 3), bias=config.qkv_bias)
        self.q_norm, self.k_norm = (RMSNorm(size, 1e-6) if config.qk_norm else None for _ in range(2))
        self.out = Linear(size, size, bias=config.bias)
        self.up = (
            GatedLinear(size, inner, bias=config.bias, activation=config.activation)
            if config.gated_mlp
            else Linear(size, inner, bias=config.bias)
        )
        self.down = Linear(inner, size, bias=config.bias)
        first, second = NAMES[config.kind].scales
        self.out_scale = Bare(first, size) if config.layer_scale else None
        self.down_scale = Bare(second, size) if config.layer_scale else None

    def __call__(self, x: Tensor, bounds: Tensor, turn: Rotations | None) -> None:
        """Adds to x [rows, hidden]; `bounds`: where segments begin; `turn`: the rotation of queries and keys."""
        qkv = self.qkv(self.norm1(x))
        if self.q_norm is not None and self.k_norm is not None:
            size = self.q_norm.size
            normalise_projections(qkv, self.q_norm.weight, self.k_norm.weight, size, size, self.q_norm.eps, False)
        heads = qkv.view(len(x), 3 * self.num_heads, self.head_dim)
        both, v = heads[:, : 2 * self.num_heads], heads[:, 2 * self.num_heads :]
        if turn is not None:
            both = apply_rope(both, *turn)
        q, k = both[:, : self.num_heads], both[:, self.num_heads :]
        _add(x, self.out, dense_attention(q, k, v, bounds, self.head_dim**-0.5), self.out_scale)
        inner = self.up(self.norm2(x))
        if not isinstance(self.up, GatedLinear):
            inner = pointwise(inner, self.activation)
        _add(x, self.down, inner, self.down_scale)


def _add(x: Tensor, product: Linear, rows: Tensor, scale: Bare | None) -> None:
    if scale is None:
        product.add_to(x, rows)
    else:
        x.addcmul_(product(rows), scale.value)


class Projector:
    """The layers' rows -> rows of the decoder's width; parts that a family lacks are None."""

    def __init__(self, config: VitConfig) -> None:
        this, size = config.projector, config.hidden_size
        self.config = this
        # Tokens of a tile, including the class token, which makes no row; 0: tiles have no class token.
        self.tokens = config.side**2 + 1 if config.class_token else 0
        wide = size * this.merge**2
        self.norm: Norm | None = None
        if this.norm:
            rms = this.norm == "rms"
            self.norm = RMSNorm(size, this.norm_eps, this.norm_offset) if rms else LayerNorm(wide, this.norm_eps)
        self.reduce = Linear(wide, size) if this.reduces else None
        wide = size if this.reduces else wide
        inner = this.inner_size or this.out_size
        self.inner = Linear(wide, inner, bias=this.bias) if this.products > 1 else None
        wide = wide if self.inner is None else inner
        self.outer = (
            Turned(this.turned, wide, this.out_size) if this.turned else Linear(wide, this.out_size, bias=this.bias)
        )

    def __call__(self, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """x [patches and class tokens, hidden] -> [patches / shrink^2, out_size]."""
        this = self.config
        if self.tokens:
            x = x.view(-1, self.tokens, x.shape[1])[:, 1:].reshape(-1, x.shape[1])
        lengths = [tiles * height * width for tiles, height, width in runs]
        rows = joined([self._neighbours(part.view(*run, -1)) for part, run in zip(x.split(lengths), runs)])
        if self.reduce is not None:
            rows = self.reduce(rows)
        if isinstance(self.norm, LayerNorm):
            rows = self.norm(rows)
        if self.inner is not None:
            rows = pointwise(self.inner(rows), this.activation)
        return self.outer(rows)

    def _neighbours(self, x: Tensor) -> Tensor:
        """x [tiles, height, width, hidden] -> [blocks, merge^2 * hidden]: neighbours averaged, normed, concatenated."""
        this = self.config
        if this.pool > 1:
            tiles, height, width, hidden = x.shape
            blocks = x.view(tiles, height // this.pool, this.pool, width // this.pool, this.pool, hidden)
            x = blocks.mean((2, 4))
        if isinstance(self.norm, RMSNorm):
            x = self.norm(x.contiguous())
        return side_by_side(x, this.merge, this.channels_first)


class Turned:
    """x W, for a matrix that the checkpoint stores as [in_features, out_features] in a bare tensor called `kind`."""

    def __init__(self, kind: str, in_features: int, out_features: int) -> None:
        self.kind = kind
        self.linear = Linear(in_features, out_features)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {self.kind: (Wanted((self.linear.in_features, *self.linear.out_features)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (piece,) = pieces[self.kind]
        assert piece is not None
        self.linear.fill({"weight": [piece.t().contiguous()]}, placement)


class JoinedProjections:
    """The projections of queries, keys and values in one tensor, as in torch's MultiheadAttention."""

    weight: Tensor  # [3 * size, size]
    bias: Tensor  # [3 * size]

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Tensor, which: int) -> Tensor:
        """x [..., size] -> [..., size]; `which`: 0 for queries, 1 for keys, 2 for values."""
        first, last = which * self.size, (which + 1) * self.size
        return torch.nn.functional.linear(x, self.weight[first:last], self.bias[first:last])

    def expects(self) -> dict[str, tuple[Wanted | None, ...]]:
        return {"in_proj_weight": (Wanted((3 * self.size, self.size)),), "in_proj_bias": (Wanted((3 * self.size,)),)}

    def fill(self, pieces: dict[str, list[Tensor | None]], placement: Placement) -> None:
        (weight,), (bias,) = pieces["in_proj_weight"], pieces["in_proj_bias"]
        assert weight is not None
        assert bias is not None
        self.weight, self.bias = (piece.to(placement.device, placement.dtype, copy=True) for piece in (weight, bias))


def side_by_side(x: Tensor, merge: int, channels_first: bool) -> Tensor:
    """x [tiles, height, width, hidden] -> [blocks, merge^2 * hidden], block after block, row by row."""
    tiles, height, width, hidden = x.shape
    if merge == 1:
        return x.reshape(-1, hidden)
    blocks = x.reshape(tiles, height // merge, merge, width // merge, merge, hidden)
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return blocks.permute(order).reshape(-1, merge**2 * hidden)
