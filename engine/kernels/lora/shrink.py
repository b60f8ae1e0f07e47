"""Shrink: low[row] = A x[row], A of the row's adapter; the first half of an adapter's product.

    low [parts, rows, pieces, RANK] float32: sums over the parts of x's columns, which `expand` adds in their order

A program computes one part of one piece for one tile of the list (kernels/lora/rows); for a tile of one row it reads
the adapter's matrix before it waits for the previous kernel. Rows without an adapter, sites
that an adapter leaves alone, and ranks beyond the adapter's own are not written. Users: engine/layers/placed_device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from engine.kernels.lora.matrices import PlaceMatrices, SiteShape, matrix_of
from engine.kernels.lora.rows import FEW, SOME, PlaceList, block_of, multiply, rows_at, tile_at
from engine.kernels.pdl import grid_wait, launch_options, let_next_start, wait_alone, wait_then_allow
from engine.kernels.target import tl, triton

BLOCK_K = 128  # columns per iteration
WIDE_K = 256  # the same for tiles of one row and low ranks
LOW_RANK = 32
PARTS = {8: 48, FEW: 32, SOME: 8}  # the most parts, for up to so many rows; beyond: LEAST_PARTS
LEAST_PARTS = 2


@triton.jit(do_not_specialize=["rows", "site"])
def shrink_kernel(
    low,  # [parts, rows, pieces, RANK] float32, rows in the list's order
    x,  # [rows, depth], rows x_stride apart
    values,  # [places, place_len]
    words,  # [places, sites] int64
    order,  # [rows] int32, or [tokens] when EACH
    tiles,  # [num_tiles, 3] int32, or [rows] when EACH
    rows,
    depth,
    part_len,
    experts,
    top_k,  # rows of the list that share a row of x
    sites,
    site,
    x_stride,
    place_len,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONCE: tl.constexpr,  # tiles of one row: a part has no more than BLOCK_K columns
    EACH: tl.constexpr,  # see PlaceList
    SETTLED: tl.constexpr,
    DURING: tl.constexpr,  # tiles of one row: x and the list are there before this kernel starts
    OVERLAP: tl.constexpr,
):
    """A program computes one tile, one part and one piece. Unless SETTLED, later kernels start when the list is."""
    tile, part, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces = tl.num_programs(2)
    if TILE == 1 and (SETTLED or DURING):
        let_next_start(OVERLAP)
    elif SETTLED:
        grid_wait(OVERLAP)
    else:
        wait_then_allow(OVERLAP)
    key, start, count = tile_at(tiles, order, tile, experts, TILE, EACH)
    if TILE == 1 or key > 0:
        place, expert = tl.maximum(key - 1, 0) // experts, tl.maximum(key - 1, 0) % experts
        word = tl.load(words + place * sites + site, cache_modifier=".cg")
        rank = tl.multiple_of(tl.where(key > 0, word & 0xFFFF, 0).to(tl.int32), 16)
        if TILE == 1 or rank > 0:
            m, n, k = tl.arange(0, TILE), tl.arange(0, RANK), tl.arange(0, BLOCK_K)
            m_in, n_in = m < count, n < rank
            begin = part * part_len
            a = values + place.to(tl.int64) * place_len + tl.multiple_of(word >> 16, 64)
            a += expert.to(tl.int64) * pieces * rank * depth
            line = (piece * rank + n).to(tl.int64) * depth
            k_in = begin + k < depth
            if TILE == 1:
                x_at, sums = x + (start // top_k).to(tl.int64) * x_stride + begin + k, tl.zeros([RANK], tl.float32)
                a_at = a + begin + line[:, None] + k[None, :]
                ahead = tl.load(a_at, mask=n_in[:, None] & (k_in & ONCE)[None, :], other=0.0)  # weights
                if SETTLED and not DURING:
                    wait_alone(OVERLAP)
                if ONCE:
                    sums += multiply(tl.load(x_at, mask=k_in, other=0.0, cache_modifier=".cg"), ahead)
                else:
                    for first in range(begin, tl.minimum(begin + part_len, depth), BLOCK_K):
                        k_in = first + k < depth
                        inputs = tl.load(x_at, mask=k_in, other=0.0, cache_modifier=".cg")
                        sums += multiply(inputs, tl.load(a_at, mask=n_in[:, None] & k_in[None, :], other=0.0))
                        x_at += BLOCK_K
                        a_at += BLOCK_K
            else:
                row = (rows_at(order, start, m, m_in, EACH) // top_k).to(tl.int64)
                x_at, sums = x + row[:, None] * x_stride + begin + k[None, :], tl.zeros([TILE, RANK], tl.float32)
                a_at = a + begin + line[None, :] + k[:, None]
                for first in range(begin, tl.minimum(begin + part_len, depth), BLOCK_K):
                    k_in = first + k < depth
                    inputs = tl.load(x_at, mask=m_in[:, None] & k_in[None, :], other=0.0)
                    matrix = tl.load(a_at, mask=k_in[:, None] & n_in[None, :], other=0.0)
                    sums = tl.dot(inputs, matrix, sums, input_precision="ieee")
                    x_at += BLOCK_K
                    a_at += BLOCK_K
            at = low + ((part.to(tl.int64) * rows + start) * pieces + piece) * RANK
            if TILE == 1:
                tl.store(at + n, sums, mask=n_in)
            else:
                at += m[:, None] * pieces * RANK + n[None, :]
                tl.store(at, sums, mask=m_in[:, None] & n_in[None, :])
    if DURING:
        wait_alone(OVERLAP)  # so that the next kernel's wait is one for the previous kernel too


def columns_of(tile: int, rank: int) -> int:
    """Columns per iteration."""
    return WIDE_K if tile == 1 and rank <= LOW_RANK else BLOCK_K


def parts_of(depth: int, rows: int, block: int, invariant: bool) -> tuple[int, int]:
    """(parts, columns of a part) of an input with `depth` columns; `invariant`: for any number of rows alike."""
    most = PARTS[SOME] if invariant else next((PARTS[limit] for limit in PARTS if rows <= limit), LEAST_PARTS)
    blocks = triton.cdiv(depth, block)
    part_len = triton.cdiv(blocks, min(most, blocks)) * block
    return triton.cdiv(depth, part_len), part_len


def padded_rank(max_rank: int) -> int:
    """The width of a piece in `low`: the next power of two."""
    return 1 << (max_rank - 1).bit_length()


def shrink(
    x: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, invariant: bool, top_k: int = 1,
    branch: AbstractContextManager[None] | None = None, during: bool = False,
) -> Tensor:  # fmt: skip
    """x [rows, in_features] with contiguous rows -> low [parts, rows, pieces, RANK] float32, in the list's order.

    `top_k`: row i of the list reads row i // top_k of x, for pairs of a token and an expert. `branch`: another stream,
    on which the kernel is launched. `during`: the previous kernel writes nothing that this one reads, and lets it start
    when the kernels before have ended; tiles of one row then need no wait.
    """
    launch = launch_shrink if x.is_cuda else shrink_reference
    return launch(x, matrices, shape, rows, invariant, top_k, branch, during)


def launch_shrink(
    x: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, invariant: bool, top_k: int = 1,
    branch: AbstractContextManager[None] | None = None, during: bool = False,
) -> Tensor:  # fmt: skip
    """Launches the Triton kernel."""
    count, depth = rows.count, x.shape[1]
    assert x.stride(1) == 1, "rows of x are contiguous"
    assert x.dtype is matrices.values.dtype, f"x is {x.dtype}, the adapters are {matrices.values.dtype}"
    assert depth == shape.in_features, f"x has {depth} features; the layer takes {shape.in_features}"
    assert count == x.shape[0] * top_k, f"x has {len(x)} rows, the list {count}"
    rank = padded_rank(matrices.max_rank)
    tile = block_of(rows, rank)
    block = columns_of(tile, rank)
    parts, part_len = parts_of(depth, count, block, invariant)
    low = torch.empty(parts, count, shape.pieces, rank, dtype=torch.float32, device=x.device)
    with branch or nullcontext():
        shrink_kernel[(rows.tiles.shape[0], parts, shape.pieces)](
            low, x, matrices.values, matrices.words, rows.order, rows.tiles, count, depth, part_len, shape.experts,
            top_k, matrices.words.shape[1], shape.number, x.stride(0), matrices.values.shape[1], TILE=tile, RANK=rank,
            BLOCK_K=block, ONCE=tile == 1 and part_len == block, EACH=rows.each, SETTLED=rows.settled,
            DURING=during and tile == 1, num_warps=4, num_stages=3, **launch_options(branch is not None),
        )  # fmt: skip
    return low


def shrink_reference(
    x: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, invariant: bool, top_k: int = 1,
    branch: AbstractContextManager[None] | None = None, during: bool = False,
) -> Tensor:  # fmt: skip
    rank = padded_rank(matrices.max_rank)
    low = torch.full((1, len(rows.order), shape.pieces, rank), float("nan"), dtype=torch.float32, device=x.device)
    with branch or nullcontext():
        for key, start, count in rows.tiles.tolist():
            found = matrix_of(matrices, key, shape)
            if found is not None:
                mine = x.index_select(0, rows.order[start : start + count].long() // top_k).float()
                each = torch.einsum("mk,prk->mpr", mine, found[0].float())
                low[0, start : start + count, :, : each.shape[2]] = each
    return low
