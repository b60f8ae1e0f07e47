"""Expand of a gated layer: out[row] = activate(gate + B low, up + B low), for rows with and without adapters.

In: gate, then up, of the base, and `low` of kernels/lora/shrink. A program computes one tile of rows and one block of
columns of the result; of single rows also A x of the next layer (kernels/lora/next_low).
Users: engine/layers/placed_device, for gate and up of an MLP and of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, activate_reference
from engine.kernels.gemm.epilogue import Unscaled, padded
from engine.kernels.lora.expand import (
    BLOCK_N,
    low_of,
    low_products,
    lows_of,
    matrix_at,
    parts_of_row,
    squares_of_row,
)
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape, matrix_of
from engine.kernels.lora.next_low import NextLow, next_constants, next_low_reference, next_matrix, write_next_low
from engine.kernels.lora.rows import PlaceList, block_of, multiply, rows_at, tile_at
from engine.kernels.pdl import grid_wait, launch_options, let_next_start, wait_alone
from engine.kernels.room import empty_rows
from engine.kernels.target import tl, triton


@triton.jit(do_not_specialize=["rows", "parts", "site", "square_parts", "next_site"])
def expand_gated_kernel(
    out,  # [rows, width]
    next_low,  # [num_blocks, rows, NEXT, RANK] float32: A x of the next layer, when NEXT
    halves,  # [rows, 2 * width]: gate, then up
    low,  # [parts, rows, pieces, RANK] float32, rows in the list's order
    values,  # [places, place_len]
    words,  # [places, sites] int64
    order,  # [rows] int32, or [tokens] when EACH
    tiles,  # [num_tiles, 3] int32, or [rows] when EACH
    squares,  # [square_parts, rows] float32 when PARTS
    rows,
    parts,
    pieces,  # 2, or 1: gate and up share A
    depth,
    width,
    experts,
    sites,
    site,
    place_len,
    square_parts,
    next_site,
    eps,
    ACT: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOWS: tl.constexpr,  # see expand_kernel
    PARTS: tl.constexpr,  # power of two >= square_parts; 0: x was not prescaled
    NEXT: tl.constexpr,  # pieces of the next layer; 0: its A x is not computed
    LINES: tl.constexpr,  # power of two >= NEXT * RANK
    EACH: tl.constexpr,  # see PlaceList
    OVERLAP: tl.constexpr,
):
    """A program computes one tile and one block of columns."""
    tile, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    if TILE > 1:
        grid_wait(OVERLAP)
    else:
        let_next_start(OVERLAP)
    key, start, count = tile_at(tiles, order, tile, experts, TILE, EACH)
    word = tl.load(words + tl.maximum(key - 1, 0) // experts * sites + site, cache_modifier=".cg")
    rank = tl.multiple_of(tl.where(key > 0, word & 0xFFFF, 0).to(tl.int32), 16)
    r, n = tl.arange(0, RANK), first + tl.arange(0, BLOCK_N)
    r_in, n_in = r < rank, n < width
    if TILE == 1:  # the adapter's matrices are weights
        gate = matrix_at(
            values, word, key, rank, 0, n, r, n_in, r_in, depth, 2 * width, pieces, experts, place_len, TILE
        )  # fmt: skip
        up = matrix_at(
            values, word, key, rank, width, n, r, n_in, r_in, depth, 2 * width, pieces, experts, place_len, TILE
        )  # fmt: skip
        if NEXT:
            next_a, lines_in = next_matrix(
                values, words, key, n, n_in, NEXT, width, experts, sites, next_site, place_len, RANK, LINES
            )
        wait_alone(OVERLAP)
        at = start.to(tl.int64) * 2 * width + n
        gates = tl.load(halves + at, mask=n_in, other=0.0)
        ups = tl.load(halves + at + width, mask=n_in, other=0.0)
        of_gate = parts_of_row(low, start, r, r_in, rows, parts, pieces, 0, BLOCK_N, RANK, LOWS)
        of_up = parts_of_row(low, start, r, r_in, rows, parts, pieces, pieces - 1, BLOCK_N, RANK, LOWS)
        scale = 1.0
        if PARTS:
            square = squares_of_row(squares, start, rows, square_parts, PARTS)
            scale = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps)
        to_gate, to_up = (tl.sum(of_gate, 0) * scale).to(gate.dtype), (tl.sum(of_up, 0) * scale).to(up.dtype)
        gates = gates.to(tl.float32) + multiply(to_gate, gate)
        ups = ups.to(tl.float32) + multiply(to_up, up)
        made = activate(gates, ups, ACT).to(out.dtype.element_ty)
        tl.store(out + start.to(tl.int64) * width + n, made, mask=n_in)
        if NEXT:
            x = tl.where(n_in, made, 0.0)
            write_next_low(next_low, next_a, lines_in, x, tl.program_id(1), start, rows, NEXT, RANK, LINES)
    elif count > 0:
        m = tl.arange(0, TILE)
        m_in = m < count
        row = rows_at(order, start, m, m_in, EACH)
        at, outer = row.to(tl.int64)[:, None] * 2 * width + n[None, :], m_in[:, None] & n_in[None, :]
        gates = tl.load(halves + at, mask=outer, other=0.0).to(tl.float32)
        ups = tl.load(halves + at + width, mask=outer, other=0.0).to(tl.float32)
        if rank > 0:
            inner = m_in[:, None] & r_in[None, :]
            gate = matrix_at(
                values, word, key, rank, 0, n, r, n_in, r_in, depth, 2 * width, pieces, experts, place_len, TILE
            )  # fmt: skip
            sums = low_of(
                low, squares, row, start, m, r, rows, parts, pieces, 0, inner, square_parts, depth, eps, RANK, LOWS,
                PARTS,
            )  # fmt: skip
            gates += tl.dot(sums.to(gate.dtype), gate, input_precision="ieee")
            up = matrix_at(
                values, word, key, rank, width, n, r, n_in, r_in, depth, 2 * width, pieces, experts, place_len, TILE
            )  # fmt: skip
            sums = low_of(
                low, squares, row, start, m, r, rows, parts, pieces, pieces - 1, inner, square_parts, depth, eps, RANK,
                LOWS, PARTS,
            )  # fmt: skip
            ups += tl.dot(sums.to(up.dtype), up, input_precision="ieee")
        made = activate(gates, ups, ACT).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * width + n[None, :], made, mask=outer)


def expand_gated(
    halves: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, activation: Activation,
    before: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    """halves [rows, 2 * width], contiguous; `low`: the result of `shrink` -> a new [rows, width]; `before`,
    `joins`: see `expand`; `next_low`: takes A x of the next layer, whose input is the result."""
    expanded = launch_expand_gated if halves.is_cuda else expand_gated_reference
    return expanded(halves, low, matrices, shape, rows, activation, before, joins, next_low)


def launch_expand_gated(
    halves: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, activation: Activation,
    before: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    """Launches the Triton kernel."""
    parts, count, pieces, rank = low.shape
    assert rows.settled, "shrink has read the list"
    assert halves.is_contiguous(), "halves are contiguous"
    assert halves.shape == (count, shape.width), f"halves have the shape {tuple(halves.shape)}"
    width = shape.width // 2
    out = empty_rows(halves, width)
    square_parts = 0 if before is None else before.squares.shape[0]
    tile = block_of(rows, rank)
    expand_gated_kernel[(rows.tiles.shape[0], triton.cdiv(width, BLOCK_N))](
        out, low if next_low is None else next_low.low, halves, low, matrices.values, matrices.words, rows.order,
        rows.tiles, low if before is None else before.squares, count, parts, pieces, shape.in_features, width,
        shape.experts, matrices.words.shape[1], shape.number, matrices.values.shape[1], square_parts,
        0 if next_low is None else next_low.shape.number, 0.0 if before is None else before.eps, ACT=int(activation),
        TILE=tile, RANK=rank, BLOCK_N=BLOCK_N, LOWS=lows_of(parts, tile, rank),
        PARTS=padded(square_parts, 1) if square_parts else 0, num_warps=4, EACH=rows.each, num_stages=2,
        **next_constants(next_low), **launch_options(joins),
    )  # fmt: skip
    return out


def expand_gated_reference(
    halves: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, activation: Activation,
    before: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    both = halves.float()
    for key, start, count in rows.tiles.tolist():
        found = matrix_of(matrices, key, shape)
        if found is not None:
            index = rows.order[start : start + count].long()
            both[index] += torch.cat(low_products(low, found, shape, index, start, before, halves.dtype), 1)
    made = activate_reference(both, activation).to(halves.dtype)
    next_low_reference(next_low, made, matrices)
    return made
