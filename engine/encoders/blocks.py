"""Parts of vision towers whose patches come block by block: the run over items, a layer, rotations by row and column.

Thread: device. In: patches of pictures or of pairs of frames, in blocks of merge x merge, row by row, and their grid.
Out: a row per block. Patches see only the patches of the same picture or frame, so items of several requests run
together. The towers run eagerly.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.base.errors import RequestError
from engine.base.request import Modality
from engine.encoders.tower import Features, PatchTower, Pieces, TowerConfig, apart, bounds_of, joined
from engine.kernels.activation import Activation
from engine.kernels.attention.dense import dense_attention
from engine.kernels.rotate import apply_rope
from engine.layers.linear import GatedLinear, Linear
from engine.layers.norm import RMSNorm

Grid = tuple[int, int, int]  # frames, height, width, in patches


class BlockConfig(TowerConfig, Protocol):
    """The properties of the configuration of a tower with blocks."""

    @property
    def merge_size(self) -> int: ...


class BlockTower(PatchTower):
    """Patches -> rows of the decoder's width."""

    config: BlockConfig
    patch_embed: Linear

    @abstractmethod
    def rows_of(self, patches: Tensor, grids: Sequence[Grid]) -> Generator[float, None, Tensor]:
        """patches [sum of frames * height * width, numbers] of the tower's dtype -> [blocks, row_width]."""

    def pieces(self, items: Sequence[Features]) -> Pieces:
        """Each item has `pixel_values` [patches, numbers] and `grid_thw` [1, 3]."""
        grids = [self._grid(features) for features in items]
        patches = joined([features["pixel_values"].to(self.device, self.dtype) for features in items])
        unit = self.config.merge_size**2
        rows = yield from self.rows_of(patches, grids)
        return apart(rows, [len(features["pixel_values"]) // unit for features in items])

    def _grid(self, features: Features) -> Grid:
        patches, (times, height, width) = features["pixel_values"], features["grid_thw"].reshape(-1).tolist()
        merge, numbers = self.config.merge_size, self.patch_embed.in_features
        fits = min(times, height, width) > 0 and not (height % merge or width % merge)
        if not fits or tuple(patches.shape) != (times * height * width, numbers):
            raise RequestError(
                f"pixel_values {list(patches.shape)} do not fit the grid {times} x {height} x {width}: "
                f"{times * height * width} patches of {numbers} numbers are needed, with sides of multiples of {merge}"
            )
        return times, height, width

    def example(self, modality: Modality, rows: int) -> Features:
        """A blank picture, about as high as wide."""
        merge, height = self.config.merge_size, math.isqrt(rows)
        grid = 1, height * merge, rows // height * merge
        patches = torch.zeros(grid[1] * grid[2], self.patch_embed.in_features, device=self.device)
        return {"pixel_values": patches, "grid_thw": torch.tensor([grid])}


class GatedLayer:
    """x += attention(norm(x)); x += mlp(norm(x)), with RMSNorms, rotations and a gated MLP of width `inner`."""

    def __init__(self, size: int, num_heads: int, inner: int, eps: float, qkv_bias: bool) -> None:
        self.num_heads = num_heads
        self.head_dim = size // num_heads
        self.norm1 = RMSNorm(size, eps)
        self.norm2 = RMSNorm(size, eps)
        self.qkv = Linear(size, 3 * size, bias=qkv_bias)
        self.out = Linear(size, size)
        self.up = GatedLinear(size, inner, bias=False, activation=Activation.SILU)
        self.down = Linear(inner, size)

    def __call__(self, x: Tensor, bounds: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Adds to x [patches, size]; cos, sin: [patches, head_dim / 2]."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3 * self.num_heads, self.head_dim)
        turned = apply_rope(heads[:, : 2 * self.num_heads], cos, sin)
        q, k, v = turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, 2 * self.num_heads :]
        self.out.add_to(x, dense_attention(q, k, v, bounds, self.head_dim**-0.5))
        self.down.add_to(x, self.up(self.norm2(x)))


def by_block(height: int, width: int, merge: int) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch, block by block: float32 [height * width]."""
    row, column = (
        axis.reshape(height // merge, merge, width // merge, merge).transpose(1, 2).reshape(-1).float()
        for axis in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    )
    return row, column


def turns_of(row: Tensor, column: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos, sin [patches, head_dim / 2]: half of the pairs are rotated by the row, half by the column."""
    quarter = head_dim // 4
    inv_freq = 1.0 / theta ** (torch.arange(quarter, dtype=torch.float32) / quarter)
    angle = torch.cat([row[:, None] * inv_freq, column[:, None] * inv_freq], dim=1)
    return angle.cos(), angle.sin()


def frame_bounds(grids: Sequence[Grid], device: torch.device) -> Tensor:
    """Where each frame begins: int32 [frames + 1]."""
    return bounds_of([height * width for times, height, width in grids for _ in range(times)], device)
