"""Tensors with spare rows, because a descriptor's block that extends beyond its tensor is slower than a full one.

Products in tiles cost up to twice as much if half of a tile's rows do not exist (gate|up of an 8B with 4-bit codes
at 192 rows: 161 us, at 256 rows 88). So inputs of products are allocated up to a full tile; the spare rows only affect
output rows that are masked. Users: kernels whose output a product reads, gemm/split_k, gemm/scaled_values.
"""

from __future__ import annotations

from torch import Tensor

MAX_ROWS = 64  # most rows that are computed in one tile
MAX_BLOCK = 128  # rows of a tile if there are more rows
TILES = (1, 32, 64)  # tile sizes for few rows; one row needs no tile


def empty_rows(like: Tensor, width: int) -> Tensor:
    """Allocate [..., width] with the leading axes of like [..., W]; for like [M, W] the storage extends to a full
    tile."""
    if like.dim() != 2:
        return like.new_empty(*like.shape[:-1], width)
    rows = len(like)
    tile = next((size for size in TILES if rows <= size), MAX_BLOCK)
    held = -(-rows // tile) * tile
    return like.new_empty(held, width)[:rows]


def whole_tiles(x: Tensor, block_m: int) -> Tensor:
    """Extend x [M, K] over the rest of its storage, up to whole tiles of block_m rows: [M or more, K]."""
    (rows, depth), stride = x.shape, x.stride(0)
    if stride < depth:  # rows overlap or repeat
        return x
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()  # values from x's first value on
    held = (there - depth) // stride + 1
    return x.as_strided((min(-(-rows // block_m) * block_m, held), depth), x.stride())
