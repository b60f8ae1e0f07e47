"""NextLow: A x of the next layer, computed by the kernel that makes x, so that the next layer needs no shrink.

    low [blocks, rows, pieces, RANK] float32: sums over the columns of each block of x, which `expand` adds up in order

The kernel makes a block of columns of one row, and multiplies the rounded values with the same columns of A, which it
reads before it waits for the previous kernel. For single rows only: with more rows the next layer would read more sums
than a shrink writes. Users: expand, expand_gated and expand_summed; engine/layers/placed_device chooses the layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import padded
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape
from engine.kernels.lora.rows import PlaceList, block_of, multiply
from engine.kernels.lora.shrink import padded_rank, shrink_reference
from engine.kernels.target import tl, triton

MOST_ROWS = 32  # entries of the list: beyond, the sums of all blocks cost more than a launch
MOST_LOWS = 1 << 13  # float32 sums of a row that a program of the next layer adds up: 64 registers per thread


class NextLow(NamedTuple):
    """A x of the next layer."""

    shape: SiteShape  # of the next layer
    rows: PlaceList  # the next layer's
    low: Tensor  # [blocks, rows, pieces, RANK] float32


@triton.jit
def next_matrix(
    values, words, key, n, n_in, pieces, depth, experts, sites, site, place_len,
    RANK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Columns n of all pieces of A, [LINES, BLOCK_N], and the mask of its lines; line: piece * RANK + r."""
    place, expert = tl.maximum(key - 1, 0) // experts, tl.maximum(key - 1, 0) % experts
    word = tl.load(words + place * sites + site, cache_modifier=".cg")
    rank = tl.multiple_of(tl.where(key > 0, word & 0xFFFF, 0).to(tl.int32), 16)
    line = tl.arange(0, LINES)
    piece, r = line // RANK, line % RANK
    inside = (piece < pieces) & (r < rank)
    a = values + place.to(tl.int64) * place_len + tl.multiple_of(word >> 16, 64)
    a += expert.to(tl.int64) * pieces * rank * depth
    at = a + (piece * rank + r).to(tl.int64)[:, None] * depth + n[None, :]
    return tl.load(at, mask=inside[:, None] & n_in[None, :], other=0.0), inside


@triton.jit
def write_next_low(next_low, matrix, inside, x, block, row, rows, pieces, RANK: tl.constexpr, LINES: tl.constexpr):
    """Writes the sums of one block of columns; x [BLOCK_N], rounded, zero beyond the row."""
    sums = multiply(x, matrix)
    at = (block.to(tl.int64) * rows + row) * pieces * RANK
    tl.store(next_low + at + tl.arange(0, LINES), sums, mask=inside)


def empty_next_low(
    shape: SiteShape, rows: PlaceList, made: PlaceList, matrices: PlaceMatrices, block: int
) -> NextLow | None:
    """Memory for A x of the layer `shape` with the list `rows`; `made`: the list of the kernel that makes x in blocks
    of `block` columns. None: there are too many rows or sums for it."""
    rank, blocks = padded_rank(matrices.max_rank), -(-shape.in_features // block)
    few = max(rows.count, made.count) <= MOST_ROWS and padded(blocks, 1) * rank <= MOST_LOWS
    if not few or block_of(made, rank) > 1 or block_of(rows, rank) > 1:
        return None
    low = torch.empty(blocks, rows.count, shape.pieces, rank, dtype=torch.float32, device=matrices.values.device)
    return NextLow(shape, rows, low)


def next_constants(next_low: NextLow | None) -> dict[str, Any]:
    """Arguments of a kernel that are constants. NEXT: pieces of the next layer, 0: there is none."""
    if next_low is None:
        return {"NEXT": 0, "LINES": 1}
    pieces, rank = next_low.low.shape[2:]
    return {"NEXT": pieces, "LINES": padded(pieces * rank, 1)}


def next_low_reference(next_low: NextLow | None, x: Tensor, matrices: PlaceMatrices) -> None:
    """A x of x [rows, in_features] in the first block's sums; the other blocks' sums are zero."""
    if next_low is not None:
        next_low.low.zero_()
        next_low.low[0] = shrink_reference(x, matrices, next_low.shape, next_low.rows, False)[0]
