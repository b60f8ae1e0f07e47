"""The parts of Qwen's vision tower: a layer, the two kinds of MLP, and the merger that makes a row of each block.

Thread: device. In: x [patches, hidden], in window order, changed in place by layers. Out: a merger's rows [blocks,
out_hidden_size]. VisionConfig holds the differences between generations.
"""

from __future__ import annotations

from torch import Tensor

from engine.encoders.qwen_vl.config import VisionConfig
from engine.encoders.qwen_vl.tables import GridTables
from engine.kernels.activation import gelu, pointwise
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.linear import Linear
from engine.layers.norm import LayerNorm, Norm, RMSNorm
from engine.layers.padded import PaddedGated, PaddedLinear

EPS = 1e-6


def tower_norm(config: VisionConfig, size: int) -> Norm:
    """A LayerNorm or an RMSNorm, as the config says."""
    return LayerNorm(size, EPS) if config.layer_norm else RMSNorm(size, EPS)


class GatedVisionMLP:
    """down(silu(gate(x)) * up(x)); `up` computes both gate and up."""

    __slots__ = ("down", "up")

    def __init__(self, config: VisionConfig) -> None:
        self.down = PaddedLinear(config.intermediate_size, config.hidden_size)
        self.up = PaddedGated(config.hidden_size, config.intermediate_size, self.down)

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        self.down.add_to(x, self.up(normed))


class PlainVisionMLP:
    """down(activate(up(x)))."""

    __slots__ = ("activation", "down", "up")

    def __init__(self, config: VisionConfig) -> None:
        self.activation = config.activation
        self.up = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        self.down.add_to(x, pointwise(self.up(normed), self.activation))


class VisionBlock:
    """One layer of the tower."""

    __slots__ = ("full", "head_dim", "mlp", "norm1", "norm2", "num_heads", "proj", "qkv")

    def __init__(self, config: VisionConfig, full: bool) -> None:
        size = config.hidden_size
        self.full = full
        self.num_heads = config.num_heads
        self.head_dim = size // config.num_heads
        self.norm1 = tower_norm(config, size)
        self.norm2 = tower_norm(config, size)
        self.qkv = Linear(size, *((3 * size,) if config.joined_qkv else (size, size, size)), bias=True)
        self.proj = PaddedLinear(size, size)
        self.mlp: GatedVisionMLP | PlainVisionMLP = (
            GatedVisionMLP(config) if config.gated_mlp else PlainVisionMLP(config)
        )

    def __call__(self, x: Tensor, tables: GridTables, room: Tensor) -> None:
        """Adds to x [patches, hidden], in window order; `room`: a buffer made by proj.room."""
        heads = self.qkv(self.norm1(x)).view(x.shape[0], 3 * self.num_heads, self.head_dim)
        turned = apply_rope(heads[:, : 2 * self.num_heads], tables.cos, tables.sin)  # q and k in one call
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        v = heads[:, 2 * self.num_heads :]
        bounds = tables.frames if self.full else tables.windows
        dense_attention(q, k, v, bounds, self.head_dim**-0.5, out=room[:, : x.shape[1]])
        self.proj.add_to(x, room)
        self.mlp.add_to(x, self.norm2(x))


class Merger:
    """Concatenates a block's patches and applies two linear layers; the norm is per patch (`apart`) or per block."""

    __slots__ = ("inner", "norm", "outer", "width")

    def __init__(self, config: VisionConfig, apart: bool) -> None:
        self.width = config.hidden_size * config.merge_size**2
        self.norm = tower_norm(config, config.hidden_size if apart else self.width)
        self.inner = Linear(self.width, self.width, bias=True)
        self.outer = Linear(self.width, config.out_hidden_size, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> [blocks, out_hidden_size]."""
        normed = self.norm(x.view(-1, self.norm.size)).view(-1, self.width)
        return self.outer(gelu(self.inner(normed)))
