"""Products with quantised weights of an accelerator: y = x W^T (+ bias) (+ residual), W widened in registers.

    w[n, k] = (value(code[n, k]) - zero[n, k // group]) * scale[n, k // group]        row_scale[n] joins the sums

A tile of codes becomes numbers of x's dtype (rounded once, from float32) on its way to the matrix units, which sum in
float32. Columns fall into parts by the weight's shape alone, as in gemm/invariant; with few rows each part is a program
of its own, and the one that arrives last adds up. Inputs that the checkpoint quantises to int8 are integers already
(gemm/quantise_rows): then sums are int32 and exact. Users: gemm/group_weight,
gemm/long_products.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.codes import FOUR_BITS, Codes, Kind
from engine.kernels.gemm.split_k import arrivals
from engine.kernels.gemm.widen import from_halves, halves, widened
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

UNITS = 256  # programs that a product of few rows should have at least
KINDS = {Kind.INT4: 0, Kind.E2M1: 1, Kind.INT8: 2, Kind.E4M3: 3}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantised matrix [N, K] as the kernels read it."""

    kind: Kind
    codes: Tensor  # [N, K], of four bits `halves` [N, ceil(K / 64) * 32]
    scales: Tensor | None  # [N, groups] float32 or bfloat16; None: row_scales alone
    row_scales: Tensor | None  # [N] float32
    zeros: Tensor | None  # [N, groups] int8
    group: int
    depth: int  # K

    def tensors(self) -> list[Tensor]:
        """All that lies in memory."""
        held = (self.codes, self.scales, self.row_scales, self.zeros)
        return [tensor for tensor in held if tensor is not None]

    def dense(self) -> Tensor:
        """[N, K] float64."""
        values = from_halves(self.codes, self.depth) if self.kind in FOUR_BITS else self.codes
        scale = values.new_ones(len(values), 1, dtype=torch.float32) if self.scales is None else self.scales
        return Codes(self.kind, values, scale, self.group, self.row_scales, self.zeros).dense()


def packed(codes: Codes) -> Packed:
    """From the canonical form; a scale for all columns is a scale per row."""
    values = halves(codes.values) if codes.kind in FOUR_BITS else codes.values.contiguous()
    scales, row_scales = None, codes.row_scale
    if codes.scale.shape[1] > 1:
        scales = codes.scale.contiguous()
    else:
        alone = codes.scale[:, 0].float()
        row_scales = alone if row_scales is None else alone * row_scales
    zeros = None if codes.zero is None else codes.zero.contiguous()
    return Packed(codes.kind, values, scales, row_scales, zeros, codes.group, codes.values.shape[1])


class Tile(NamedTuple):
    """How a product is cut."""

    block_m: int  # tokens
    block_n: int  # weight rows
    block_k: int  # columns read at a time
    part_len: int  # columns of a part
    stages: int
    warps: int


@triton.jit
def add_product(
    sums, values, columns, first, x, scales, zeros, n, m, n_in, m_in, depth, x_stride, groups,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, EXACT: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """sums [n, m] + (values [n, columns], scaled) times x's columns; ONE_GROUP: `columns` share their scales."""
    inside = columns < depth
    if SCALES or ZEROS:
        line = n.to(tl.int64) * groups
        if ONE_GROUP:
            at, mask = (line + first // GROUP)[:, None], n_in[:, None]
        else:
            at, mask = line[:, None] + (columns // GROUP)[None, :], n_in[:, None] & inside[None, :]
        if ZEROS:
            values -= tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
        if SCALES:
            values *= tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    x_at = x + m.to(tl.int64)[None, :] * x_stride + columns[:, None]
    tokens = tl.load(x_at, mask=m_in[None, :] & inside[:, None], other=0)
    if EXACT:
        sums = tl.dot(values.to(tl.int8), tokens, sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(values.to(tokens.dtype), tokens, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    out,  # [rows, width]
    partial,  # [tiles, parts, BLOCK_N, BLOCK_M] float32, int32 when EXACT, when APART
    arrived,  # [MAX_TILES] int32 when APART; zero before and after
    x,  # [rows, depth], rows x_stride apart; int8 when EXACT
    codes,  # [width, line]
    scales,  # [width, groups] when SCALES
    zeros,  # [width, groups] int8 when ZEROS
    row_scales,  # [width] float32 when ROW_SCALES
    x_scales,  # [rows] float32 when EXACT
    bias,  # [width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    rows,
    width,
    depth,
    line,
    groups,
    x_stride,
    parts,
    part_len,
    KIND: tl.constexpr,  # of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    EXACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    APART: tl.constexpr,  # one part per program
    ONE_GROUP: tl.constexpr,  # columns that are read at a time share their scales
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile per program, all its parts or one of them; neighbours read the same weights."""
    FOUR: tl.constexpr = KIND < 2
    HALF: tl.constexpr = 32
    program, m_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M)
    n = program // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = program % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n_in, m_in = n < width, m < rows
    code_line = codes + n.to(tl.int64)[:, None] * line
    first_part = tl.program_id(1)
    kind: tl.constexpr = tl.int32 if EXACT else tl.float32
    total = tl.zeros([BLOCK_N, BLOCK_M], kind)
    grid_wait(OVERLAP)
    for part in range(first_part, first_part + 1 if APART else parts):
        start = part * part_len
        sums = tl.zeros([BLOCK_N, BLOCK_M], kind)
        for first in range(start, tl.minimum(start + part_len, depth), BLOCK_K):
            if FOUR:
                j = tl.arange(0, BLOCK_K // 2)
                byte = first // 2 + j
                both = tl.load(code_line + byte[None, :], mask=n_in[:, None] & (byte < line)[None, :], other=0)
                columns = first + j // HALF * (2 * HALF) + j % HALF
                sums = add_product(
                    sums, widened(both & 15, KIND), columns, first, x, scales, zeros, n, m, n_in, m_in, depth,
                    x_stride, groups, GROUP, SCALES, ZEROS, EXACT, ONE_GROUP,
                )  # fmt: skip
                sums = add_product(
                    sums, widened(both >> 4, KIND), columns + HALF, first, x, scales, zeros, n, m, n_in, m_in, depth,
                    x_stride, groups, GROUP, SCALES, ZEROS, EXACT, ONE_GROUP,
                )  # fmt: skip
            else:
                columns = first + tl.arange(0, BLOCK_K)
                inside = n_in[:, None] & (columns < depth)[None, :]
                each = tl.load(code_line + columns[None, :], mask=inside, other=0)
                sums = add_product(
                    sums, widened(each, KIND), columns, first, x, scales, zeros, n, m, n_in, m_in, depth,
                    x_stride, groups, GROUP, SCALES, ZEROS, EXACT, ONE_GROUP,
                )  # fmt: skip
        total += sums
    last = True
    if APART:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial + (program * parts).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(mine + first_part * size, total, mask=m_in[None, :])
        tl.debug_barrier()  # every thread's part is written before the arrival is told
        last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.zeros([BLOCK_N, BLOCK_M], kind)
            for part in range(parts):
                total += tl.load(mine + part * size, mask=m_in[None, :], other=0, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if last:
        y = total.to(tl.float32)
        if ROW_SCALES:
            y *= tl.load(row_scales + n, mask=n_in, other=0.0)[:, None]
        if EXACT:
            y *= tl.load(x_scales + m, mask=m_in, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
        inside = n_in[:, None] & m_in[None, :]
        target = m.to(tl.int64)[None, :] * width + n[:, None]
        if RESIDUAL:
            y += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + target, y.to(out.dtype.element_ty), mask=inside)


def groups_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, x_scales: Tensor | None,
    tile: Tile,
) -> None:  # fmt: skip
    """x [M, K] with contiguous rows times the weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out.

    With x_scales, float32 [M], x is int8 and the weight INT8 with a scale per row. Capturable once `arrivals` was
    called on the device.
    """
    if x.is_cuda:
        launch_groups_product(x, weight, bias, residual, out, x_scales, tile)
    else:
        groups_product_reference(x, weight, bias, residual, out, x_scales, tile)


def launch_groups_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, x_scales: Tensor | None,
    tile: Tile,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `groups_product`."""
    (rows, depth), width, exact = x.shape, len(weight.codes), x_scales is not None
    assert x.stride(1) == 1 and out.is_contiguous() and out.shape == (rows, width)
    assert depth == weight.depth, f"x has {depth} features; this layer takes {weight.depth}"
    assert not exact or (x.dtype == torch.int8 and weight.kind is Kind.INT8 and weight.scales is None)
    if rows == 0:
        return
    tiles, parts = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n), -(-depth // tile.part_len)
    apart = parts > 1 and tiles < UNITS
    partial = out
    if apart:
        size = tiles * parts * tile.block_m * tile.block_n
        partial = torch.empty(size, dtype=torch.int32 if exact else torch.float32, device=x.device)
    one_group = len(weight.codes) > 0 and (depth <= weight.group or weight.group % tile.block_k == 0)
    codes_kernel[(tiles, parts if apart else 1)](
        out, partial, arrivals(x.device) if apart else out, x, weight.codes,
        out if weight.scales is None else weight.scales, out if weight.zeros is None else weight.zeros,
        out if weight.row_scales is None else weight.row_scales, out if x_scales is None else x_scales,
        out if bias is None else bias, out if residual is None else residual,
        rows, width, depth, weight.codes.shape[1], -(-depth // weight.group), x.stride(0), parts, tile.part_len,
        KIND=KINDS[weight.kind], GROUP=weight.group, SCALES=weight.scales is not None, ZEROS=weight.zeros is not None,
        ROW_SCALES=weight.row_scales is not None, EXACT=exact, BIAS=bias is not None, RESIDUAL=residual is not None,
        APART=apart, ONE_GROUP=one_group, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip


def tile_of(rows: int | None, width: int, depth: int, size: int, stages: int) -> Tile:
    """The tile for so many rows (None: any, in --deterministic) of `size` bytes per value."""
    block_k = 128 if size <= 2 else 64
    block_m = 64 if rows is None or rows > 32 or size > 2 else 32 if rows > 16 else 16
    parts = max(1, min(-(-UNITS // triton.cdiv(width, 64)), depth // 512))
    part_len = triton.cdiv(triton.cdiv(depth, parts), block_k) * block_k
    return Tile(block_m, 64, block_k, part_len, stages, 4)


def tile_for(x: Tensor, weight: Packed, invariant: bool = False) -> Tile:
    """The tile of these rows x [M, K] by this weight on this device."""
    stages = 3 if target().loads_past_registers else 2
    return tile_of(None if invariant else len(x), len(weight.codes), weight.depth, x.itemsize, stages)


def groups_product_reference(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, x_scales: Tensor | None,
    tile: Tile,
) -> None:  # fmt: skip
    wide = torch.float64 if x.dtype in (torch.float64, torch.int8) else torch.float32
    y = torch.nn.functional.linear(x.to(wide), weight.dense().to(wide))
    if x_scales is not None:
        y = y * x_scales.to(wide)[:, None]
    for added in (bias, residual):
        if added is not None:
            y = y + added
    out.copy_(y)
