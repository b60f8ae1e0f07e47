"""Expand: y[row] += B low[row], B of the row's adapter; the second half of an adapter's product.

In: `low` of kernels/lora/shrink, whose parts are added in their order and rounded to y's dtype, as PEFT rounds A x. A
program computes one tile of rows and one block of columns, which lies in one piece of the layer; so no two programs
write the same values. Users: engine/layers/placed_device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.lora.matrices import PlaceMatrices, SiteShape, matrix_of
from engine.kernels.lora.rows import PlaceList
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

BLOCK_N = 64  # columns of a program


@triton.jit(do_not_specialize=["rows", "parts", "site"])
def expand_kernel(
    y,  # [rows, width]
    low,  # [parts, rows, pieces, RANK] float32, rows in the list's order
    values,  # [places, place_len]
    words,  # [places, sites] int64
    order,  # [rows] int32
    tiles,  # [num_tiles, 3] int32
    blocks,  # [num_blocks, 3] int32: piece, first column, end of the piece's columns
    rows,
    parts,
    pieces,
    depth,
    width,
    experts,
    sites,
    site,
    place_len,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes one tile and one block of columns."""
    tile, block = tl.program_id(0), tl.program_id(1)
    piece, first, limit = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    grid_wait(OVERLAP)
    key = tl.load(tiles + tile * 3)
    if key > 0:
        start, count = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        place, expert = (key - 1) // experts, (key - 1) % experts
        word = tl.load(words + place * sites + site)
        rank = tl.multiple_of((word & 0xFFFF).to(tl.int32), 16)
        if rank > 0:
            m, r, n = tl.arange(0, TILE), tl.arange(0, RANK), first + tl.arange(0, BLOCK_N)
            m_in, r_in, n_in = m < count, r < rank, n < limit
            row = tl.load(order + start + m, mask=m_in, other=0).to(tl.int64)
            before = rank.to(tl.int64) * (experts * pieces * depth + expert * width)  # A, and B of lower experts
            b = values + place.to(tl.int64) * place_len + tl.multiple_of(word >> 16, 64) + before
            b_at = b + n.to(tl.int64)[None, :] * rank + r[:, None]
            matrix = tl.load(b_at, mask=r_in[:, None] & n_in[None, :], other=0.0)
            inner = m_in[:, None] & r_in[None, :]
            sums = tl.zeros([TILE, RANK], tl.float32)
            for part in range(parts):
                at = ((tl.full([], part, tl.int64) * rows + start + m) * pieces + piece) * RANK
                sums += tl.load(low + at[:, None] + r[None, :], mask=inner, other=0.0)
            delta = tl.dot(sums.to(matrix.dtype), matrix, input_precision="ieee")
            y_at = y + row[:, None] * width + n[None, :]
            outer = m_in[:, None] & n_in[None, :]
            total = tl.load(y_at, mask=outer, other=0.0).to(tl.float32) + delta
            tl.store(y_at, total.to(y.dtype.element_ty), mask=outer)


def blocks_of(shape: SiteShape, device: torch.device | str) -> Tensor:
    """The blocks of a layer's columns, int32 [num_blocks, 3]; made once per layer."""
    found, start = [], 0
    for piece, width in enumerate(shape.out_features):
        found += [(piece, first, start + width) for first in range(start, start + width, BLOCK_N)]
        start += width
    return torch.tensor(found, dtype=torch.int32, device=device)


def expand(y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor) -> None:
    """Adds to y [rows, out_features], contiguous, in place; `low`: the result of `shrink`; `blocks`: of blocks_of."""
    (launch_expand if y.is_cuda else expand_reference)(y, low, matrices, shape, rows, blocks)


def launch_expand(
    y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor
) -> None:
    """Launches the Triton kernel."""
    parts, count, pieces, rank = low.shape
    assert y.is_contiguous(), "y is contiguous"
    assert y.shape == (count, shape.width), f"y has the shape {tuple(y.shape)}"
    expand_kernel[(len(rows.tiles), len(blocks))](
        y, low, matrices.values, matrices.words, rows.order, rows.tiles, blocks, count, parts, pieces,
        shape.in_features, y.shape[1], shape.experts, matrices.words.shape[1], shape.number, matrices.values.shape[1],
        TILE=rows.tile, RANK=rank, BLOCK_N=BLOCK_N, num_warps=4, num_stages=2, **launch_options(),
    )  # fmt: skip


def expand_reference(
    y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor
) -> None:
    for key, start, count in rows.tiles.tolist():
        found = matrix_of(matrices, key, shape)
        if found is None:
            continue
        a, b = found
        sums = low[:, start : start + count, :, : a.shape[1]].sum(0).to(y.dtype).float()
        index = rows.order[start : start + count].long()
        delta = [sums[:, piece] @ each.float().T for piece, each in enumerate(b.split(list(shape.out_features)))]
        y[index] = (y[index].float() + torch.cat(delta, 1)).to(y.dtype)
