"""Rows with room behind them: a block of a tensor descriptor that ends beyond its tensor takes longer than a full one.

Products in tiles cost up to twice as much where half of a tile's rows do not exist (gate|up of an 8B by four-bit codes
at 192 rows: 161 us, at 256 rows 88). So what a product will read is allocated up to a full tile; what lies there feeds
output rows that are masked. Users: kernels whose output a product reads, gemm/split_k, gemm/scaled_values.
"""

from __future__ import annotations

from torch import Tensor

MAX_ROWS = 64  # that lie in one tile
MAX_BLOCK = 128  # rows of a tile where rows are cut into tiles
TILES = (1, 32, 64)  # rows of the tiles that few rows lie in; one row is no tile


def empty_rows(like: Tensor, width: int) -> Tensor:
    """Uninitialised [..., width], the axes before as in like [..., W]: of rows [M, W] the storage ends with a tile."""
    if like.dim() != 2:
        return like.new_empty(*like.shape[:-1], width)
    rows = len(like)
    tile = next((size for size in TILES if rows <= size), MAX_BLOCK)
    held = -(-rows // tile) * tile
    return like.new_empty(held, width)[:rows]


def whole_tiles(x: Tensor, block_m: int) -> Tensor:
    """x [M, K] and what its storage holds behind it, up to whole tiles of block_m rows: [M or more, K]."""
    (rows, depth), stride = x.shape, x.stride(0)
    if stride < depth:  # the same values again and again
        return x
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()  # values, from x's first on
    held = (there - depth) // stride + 1
    return x.as_strided((min(-(-rows // block_m) * block_m, held), depth), x.stride())
