"""Expand: y[row] += B low[row], B of the row's adapter; the second half of an adapter's product.

In: `low` of kernels/lora/shrink, whose parts are added in their order and rounded to y's dtype, as PEFT rounds A x. A
program computes one tile of rows and one block of columns, which lies in one piece of the layer; so no two programs
write the same values. If x was prescaled for a norm (gemm/epilogue.Unscaled), `low` is divided by the root mean square
here. If a norm follows the sum, the kernel also writes the prescaled rows of all rows, so that the norm needs no
kernel; of single rows it also computes A x of the layer behind the norm (kernels/lora/next_low).
Users: engine/layers/placed_device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled, padded, squares_of
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape, matrix_of
from engine.kernels.lora.next_low import NextLow, next_constants, next_low_reference, next_matrix, write_next_low
from engine.kernels.lora.rows import LEAST_BLOCK, PlaceList, block_of, multiply, rows_at, tile_at
from engine.kernels.pdl import grid_wait, launch_options, let_next_start, wait_alone
from engine.kernels.target import tl, triton

BLOCK_N = 64  # columns of a program
AT_ONCE = 1 << 11  # float32 values of a program: 16 per thread


@triton.jit
def low_of(
    low, squares, row, start, m, r, rows, parts, pieces, piece, inner, square_parts, depth, eps,
    RANK: tl.constexpr, LOWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The sums of `low` over its parts, float32 [TILE, RANK]; PARTS: divided by the root mean square of x's rows."""
    part, lows = tl.arange(0, LOWS), tl.zeros([LOWS, inner.shape[0], RANK], tl.float32)
    at = ((part.to(tl.int64)[:, None] * rows + start + m[None, :]) * pieces + piece) * RANK
    at = low + at[:, :, None] + r[None, None, :]
    for first in range(0, parts, LOWS):
        lows += tl.load(at, mask=inner[None, :, :] & (first + part < parts)[:, None, None], other=0.0)
        at += tl.full([], LOWS * RANK, tl.int64) * rows * pieces
    sums = tl.sum(lows, 0)
    if PARTS:
        square = squares_of(squares, row, rows, square_parts, PARTS)
        sums *= (1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps))[:, None]
    return sums


@triton.jit
def parts_of_row(
    low, start, r, r_in, rows, parts, pieces, piece, BLOCK_N: tl.constexpr, RANK: tl.constexpr, LOWS: tl.constexpr
):  # fmt: skip
    """The parts of `low` of a single row, float32 [BLOCK_N, RANK]: B's shape, so that both have one layout."""
    lows = tl.zeros([BLOCK_N, RANK], tl.float32)
    for turn in tl.static_range(LOWS):
        part = turn * BLOCK_N + tl.arange(0, BLOCK_N)
        at = ((part * rows + start) * pieces + piece) * RANK
        lows += tl.load(low + at[:, None] + r[None, :], mask=(part < parts)[:, None] & r_in[None, :], other=0.0)
    return lows


@triton.jit
def squares_of_row(squares, start, rows, square_parts, PARTS: tl.constexpr):
    """The sums of squares of a single row, [PARTS]."""
    part = tl.arange(0, PARTS)
    return tl.load(squares + part * rows + start, mask=part < square_parts, other=0.0)


@triton.jit
def matrix_at(
    values, word, key, rank, rows_before, n, r, n_in, r_in, depth, width, pieces, experts, place_len, TILE: tl.constexpr
):  # fmt: skip
    """B of rows n, [RANK, BLOCK_N]; for a single row [BLOCK_N, RANK]. `rows_before`: the first of them in the layer."""
    place, expert = (key - 1) // experts, (key - 1) % experts
    before = rank.to(tl.int64) * (experts * pieces * depth + expert * width + rows_before)  # A, and lower rows of B
    b = values + place.to(tl.int64) * place_len + tl.multiple_of(word >> 16, 64) + before
    n = n.to(tl.int64)
    if TILE == 1:
        matrix = tl.load(b + n[:, None] * rank + r[None, :], mask=n_in[:, None] & r_in[None, :], other=0.0)
    else:
        matrix = tl.load(b + n[None, :] * rank + r[:, None], mask=r_in[:, None] & n_in[None, :], other=0.0)
    return matrix


@triton.jit(do_not_specialize=["rows", "parts", "pieces", "site", "square_parts", "next_site"])
def expand_kernel(
    y,  # [rows, width]
    gained,  # [rows, width] y * gain when AFTER
    counted,  # [num_blocks, rows] float32: sums of squares of y when AFTER
    next_low,  # [num_blocks, rows, NEXT, RANK] float32: A x of the layer behind the norm, when NEXT
    low,  # [parts, rows, pieces, RANK] float32, rows in the list's order
    values,  # [places, place_len]
    words,  # [places, sites] int64
    order,  # [rows] int32, or [tokens] when EACH
    tiles,  # [num_tiles, 3] int32, or [rows] when EACH
    blocks,  # [num_blocks, 3] int32: piece, first column, end of the piece's columns
    gain,  # [width] float32 when AFTER
    squares,  # [square_parts, rows] float32 when PARTS
    rows,
    parts,
    pieces,
    depth,
    width,
    experts,
    sites,
    site,
    place_len,
    square_parts,
    next_site,
    eps,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOWS: tl.constexpr,  # of lows_of
    AFTER: tl.constexpr,
    NEXT: tl.constexpr,  # pieces of the layer behind the norm; 0: its A x is not computed
    LINES: tl.constexpr,  # power of two >= NEXT * RANK
    PARTS: tl.constexpr,  # power of two >= square_parts; 0: x was not prescaled
    EACH: tl.constexpr,  # see PlaceList
    OVERLAP: tl.constexpr,
):
    """A program computes one tile and one block of columns."""
    tile, block = tl.program_id(0), tl.program_id(1)
    if TILE == 1:
        let_next_start(OVERLAP)
    piece, first, limit = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    if TILE > 1:
        grid_wait(OVERLAP)
    key, start, count = tile_at(tiles, order, tile, experts, TILE, EACH)
    word = tl.load(words + tl.maximum(key - 1, 0) // experts * sites + site, cache_modifier=".cg")
    rank = tl.multiple_of(tl.where(key > 0, word & 0xFFFF, 0).to(tl.int32), 16)
    r, n = tl.arange(0, RANK), first + tl.arange(0, BLOCK_N)
    r_in, n_in = r < rank, n < limit
    if TILE == 1:
        matrix = matrix_at(
            values, word, key, rank, 0, n, r, n_in, r_in, depth, width, pieces, experts, place_len, TILE
        )  # fmt: skip
        if NEXT:  # a layer with one piece, whose blocks begin at multiples of BLOCK_N
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            next_a, lines_in = next_matrix(
                values, words, key, columns, columns < width, NEXT, width, 1, sites, next_site, place_len, RANK, LINES
            )
        if AFTER:
            gains = tl.load(gain + n, mask=n_in, other=0.0)
        wait_alone(OVERLAP)  # the adapter's matrices are weights
        at = start.to(tl.int64) * width + n
        before = tl.load(y + at, mask=n_in, other=0.0)
        lows = parts_of_row(low, start, r, r_in, rows, parts, pieces, piece, BLOCK_N, RANK, LOWS)
        if PARTS:
            square = squares_of_row(squares, start, rows, square_parts, PARTS)
        sums = tl.sum(lows, 0)
        if PARTS:
            sums *= 1.0 / tl.sqrt_rn(tl.sum(square, 0) / depth + eps)
        total = (before.to(tl.float32) + multiply(sums.to(matrix.dtype), matrix)).to(y.dtype.element_ty)
        tl.store(y + at, total, mask=n_in)
        if AFTER:
            written = tl.where(n_in, total.to(tl.float32), 0.0)
            scaled = (written * gains).to(y.dtype.element_ty)
            tl.store(gained + at, scaled, mask=n_in)
            tl.store(counted + block * rows + start, tl.sum(written * written, 0))
            if NEXT:
                write_next_low(next_low, next_a, lines_in, scaled, block, start, rows, NEXT, RANK, LINES)
    else:
        needed = count if AFTER else rank
        if needed > 0:
            m = tl.arange(0, TILE)
            m_in = m < count
            row = rows_at(order, start, m, m_in, EACH)
            matrix = matrix_at(
                values, word, key, rank, 0, n, r, n_in, r_in, depth, width, pieces, experts, place_len, TILE
            )  # fmt: skip
            sums = low_of(
                low, squares, row, start, m, r, rows, parts, pieces, piece, m_in[:, None] & r_in[None, :], square_parts,
                depth, eps, RANK, LOWS, PARTS,
            )  # fmt: skip
            delta = tl.dot(sums.to(matrix.dtype), matrix, input_precision="ieee")
            at, outer = row.to(tl.int64)[:, None] * width + n[None, :], m_in[:, None] & n_in[None, :]
            total = (tl.load(y + at, mask=outer, other=0.0).to(tl.float32) + delta).to(y.dtype.element_ty)
            tl.store(y + at, total, mask=outer)
            if AFTER:
                written = tl.where(outer, total.to(tl.float32), 0.0)
                tl.store(counted + block * rows + row, tl.sum(written * written, 1), mask=m_in)
                gains = tl.load(gain + n, mask=n_in, other=0.0)
                tl.store(gained + at, (written * gains[None, :]).to(y.dtype.element_ty), mask=outer)


def lows_of(parts: int, tile: int, rank: int) -> int:
    """LOWS of a kernel. Tiles of one row: turns in each of which BLOCK_N parts are read. Other tiles: parts that are
    read at once; of small tiles there are many parts, and each turn waits for memory."""
    if tile == 1:
        return triton.cdiv(parts, BLOCK_N)
    return max(1, min(padded(parts, 1), AT_ONCE // (tile * rank))) if tile == LEAST_BLOCK else 1


def blocks_of(shape: SiteShape, device: torch.device | str) -> Tensor:
    """The blocks of a layer's columns, int32 [num_blocks, 3]; made once per layer."""
    found, start = [], 0
    for piece, width in enumerate(shape.out_features):
        found += [(piece, first, start + width) for first in range(start, start + width, BLOCK_N)]
        start += width
    return torch.tensor(found, dtype=torch.int32, device=device)


def expand(
    y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor,
    before: Unscaled | None = None, after: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> None:  # fmt: skip
    """Adds to y [rows, out_features], contiguous, in place; `low`: the result of `shrink`; `blocks`: of blocks_of.

    before: the prescaled rows of which `low` was made. after: takes y's prescaled rows, for the norm that follows.
    joins: `low` comes from another stream. next_low: takes A x of the layer behind that norm.
    """
    expanded = launch_expand if y.is_cuda else expand_reference
    expanded(y, low, matrices, shape, rows, blocks, before, after, joins, next_low)


def empty_after(y: Tensor, gain: Tensor, eps: float) -> Unscaled | None:
    """Memory for `after`. None: there are too many sums."""
    return empty_unscaled(y, BLOCK_N, gain, eps)


def launch_expand(
    y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor,
    before: Unscaled | None = None, after: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> None:  # fmt: skip
    """Launches the Triton kernel."""
    parts, count, pieces, rank = low.shape
    assert rows.settled, "shrink has read the list"
    assert y.is_contiguous(), "y is contiguous"
    assert y.shape == (count, shape.width), f"y has the shape {tuple(y.shape)}"
    assert next_low is None or (after is not None and shape.experts == 1), "A x of prescaled rows of tokens"
    assert next_low is None or shape.pieces == 1, "rows of one piece"
    square_parts = 0 if before is None else before.squares.shape[0]
    tile = block_of(rows, rank)
    expand_kernel[(rows.tiles.shape[0], blocks.shape[0])](
        y, y if after is None else after.rows, low if after is None else after.squares,
        low if next_low is None else next_low.low, low, matrices.values, matrices.words, rows.order, rows.tiles, blocks,
        low if after is None else after.gain, low if before is None else before.squares, count, parts, pieces,
        shape.in_features, y.shape[1], shape.experts, matrices.words.shape[1], shape.number, matrices.values.shape[1],
        square_parts, 0 if next_low is None else next_low.shape.number, 0.0 if before is None else before.eps,
        TILE=tile, RANK=rank, BLOCK_N=BLOCK_N, LOWS=lows_of(parts, tile, rank), AFTER=after is not None,
        PARTS=padded(square_parts, 1) if square_parts else 0, num_warps=4, EACH=rows.each, num_stages=2,
        **next_constants(next_low), **launch_options(joins),
    )  # fmt: skip


def expand_reference(
    y: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, rows: PlaceList, blocks: Tensor,
    before: Unscaled | None = None, after: Unscaled | None = None, joins: bool = False, next_low: NextLow | None = None,
) -> None:  # fmt: skip
    for key, start, count in rows.tiles.tolist():
        found = matrix_of(matrices, key, shape)
        if found is None:
            continue
        index = rows.order[start : start + count].long()
        delta = torch.cat(low_products(low, found, shape, index, start, before, y.dtype), 1)
        y[index] = (y[index].float() + delta).to(y.dtype)
    if after is not None:
        wide = torch.nn.functional.pad(y.float(), (0, -y.shape[1] % BLOCK_N)).unflatten(1, (-1, BLOCK_N))
        after.squares.copy_(wide.square().sum(2).T)
        after.rows.copy_(y.float() * after.gain)
        next_low_reference(next_low, after.rows, matrices)


def low_products(
    low: Tensor, found: tuple[Tensor, Tensor], shape: SiteShape, index: Tensor, start: int, before: Unscaled | None,
    dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """B low of the rows of one tile, float32 [count, rows of the piece] for each piece."""
    a, b = found
    sums = low[:, start : start + len(index), :, : a.shape[1]].sum(0)
    if before is not None:
        mean = before.squares[:, index].sum(0) / shape.in_features
        sums = sums / (mean + before.eps).sqrt()[:, None, None]
    sums = sums.to(dtype).float()
    return [sums[:, piece] @ each.float().T for piece, each in enumerate(b.split(list(shape.out_features)))]
