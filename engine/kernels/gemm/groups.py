"""Products with quantised weights of an accelerator: y = x W^T (+ bias) (+ residual), W widened in registers.

    w[n, k] = (value(code[n, k]) - zero[n, k // group]) * scale[n, k // group]        row_scale[n] multiplies the sums

gemm/code_sums has the inner loop. The division of columns into parts depends only on the weight's shape, as in
gemm/invariant. With few rows each part is a separate program, and the program that arrives last adds up the parts.
Inputs quantised to int8 by gemm/quantise_rows make exact int32 sums. Users: gemm/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gemm.code_sums import block_k_of, code_sums, integer_sums, scales_sums
from engine.kernels.gemm.codes import Codes, Kind
from engine.kernels.gemm.epilogue import scaled_plus
from engine.kernels.gemm.split_k import PREFETCH, arrivals, fetch
from engine.kernels.gemm.widen import E2M1, E4M3, INT4, INT8, NF4, codes_in, codes_per_word, words_of
from engine.kernels.pdl import grid_wait, launch_options, overlaps
from engine.kernels.target import target, tl, triton

ROUND = 128  # a single group for all columns is rounded up to a multiple of ROUND, as tiles are
UNITS = 256  # programs that a product of few rows should have at least
KINDS = {Kind.INT4: INT4, Kind.E2M1: E2M1, Kind.NF4: NF4, Kind.INT8: INT8, Kind.E4M3: E4M3}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantised matrix [N, K] in the kernels' format."""

    kind: Kind
    codes: Tensor  # [N, K] single codes; with `words` int16 [N, ..] of gemm/widen
    words: bool
    scales: Tensor | None  # [N, groups] float32, bfloat16 or, of INT4, float16; None: only row_scales
    row_scales: Tensor | None  # [N] float32
    zeros: Tensor | None  # [N, groups] int8 or float32
    group: int
    depth: int  # K
    blocks: Tensor | None = None  # [N / 128, K / 128 in fours] float32: scales of whole blocks, for the library
    tall: int = 1  # rows that share a line of scales; above 1: scales of blocks

    def tensors(self) -> list[Tensor]:
        """All tensors, for counting bytes."""
        held = (self.codes, self.scales, self.row_scales, self.zeros, self.blocks)
        return [tensor for tensor in held if tensor is not None]

    def dense(self) -> Tensor:
        """[N, K] float64."""
        values = self.codes
        if self.words:
            values = codes_in(values, codes_per_word(KINDS[self.kind]), self.depth)
            values = values.view(torch.int8) if self.kind is Kind.INT8 else values
        scale = values.new_ones(len(values), 1, dtype=torch.float32) if self.scales is None else self.scales
        scale = scale if self.tall == 1 else scale.repeat_interleave(self.tall, 0)
        return Codes(self.kind, values, scale, self.group, self.row_scales, self.zeros).dense()


def packed(codes: Codes, words: bool = True) -> Packed:
    """Packs canonical codes; a single scale for all columns becomes a row scale. `words`: False for products of codes
    with codes."""
    values = codes.values.contiguous()
    if words:
        values = words_of(values, codes_per_word(KINDS[codes.kind]))
    scales, row_scales = None, codes.row_scale
    if codes.scale.shape[1] > 1:
        scales = narrowed(codes.scale.contiguous()) if codes.kind is Kind.INT4 else codes.scale.contiguous()
    else:
        alone = codes.scale[:, 0].float()
        row_scales = alone if row_scales is None else alone * row_scales
    zeros = None if codes.zero is None else codes.zero.contiguous()
    depth = codes.values.shape[1]
    group = codes.group if depth > codes.group else -(-depth // ROUND) * ROUND
    return Packed(codes.kind, values, words, scales, row_scales, zeros, group, depth)


def narrowed(scales: Tensor) -> Tensor:
    """Scales as float16 if it holds each of them exactly, as of checkpoints in float16; else unchanged."""
    if scales.dtype is not torch.float32:
        return scales
    half = scales.half()
    return half if torch.equal(half.float(), scales) else scales


class Tile(NamedTuple):
    """How a product is cut."""

    block_m: int  # tokens
    block_n: int  # weight rows
    block_k: int  # columns read at a time
    part_len: int  # columns of a part
    stages: int
    warps: int


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    out,  # [rows, width]
    partial,  # [tiles, parts, BLOCK_N, BLOCK_M] float32, int32 when EXACT, when APART
    arrived,  # [MAX_TILES] int32 when APART; zero before and after
    x,  # [rows, depth], rows x_stride apart; int8 when EXACT
    codes,  # [width, line] words; EXACT: [width, depth] int8
    scales,  # [width, groups] when SCALES
    zeros,  # [width, groups] int8 or float32 when ZEROS
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
    KIND: tl.constexpr,  # a kind of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    EXACT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    APART: tl.constexpr,  # one part per program
    ON_SUMS: tl.constexpr,  # ON_SUMS, PAIRS and EVEN: constants of gemm/code_sums
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,  # lines of 128 bytes of each row of codes that are prefetched before x is available
    OVERLAP: tl.constexpr,
):
    """Computes one tile per program, all parts or one part; neighbouring programs read the same weights."""
    PER: tl.constexpr = 1 if EXACT else 4 if KIND < 3 else 2
    program, m_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M)
    n = program // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = program % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n_in, m_in = n < width, m < rows
    first_part = tl.program_id(1)
    kind: tl.constexpr = tl.int32 if EXACT else tl.float32
    total = tl.zeros([BLOCK_N, BLOCK_M], kind)
    if PREFETCH:
        per_line: tl.constexpr = 128 // (codes.dtype.element_ty.primitive_bitwidth // 8)
        ahead = first_part * part_len // PER + tl.arange(0, PREFETCH) * per_line
        fetch(codes + n.to(tl.int64)[:, None] * line + ahead[None, :], n_in[:, None] & (ahead < line)[None, :])
    grid_wait(OVERLAP)
    for part in range(first_part, first_part + 1 if APART else parts):
        start = part * part_len
        end = tl.minimum(start + part_len, depth)
        if EXACT:
            total += integer_sums(n, n_in, m, m_in, x, codes, start, end, depth, x_stride, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            total += code_sums(
                n, n_in, m, m_in, x, codes, scales, zeros, start, end, depth, line, groups, x_stride, KIND, GROUP,
                SCALES, ZEROS, ON_SUMS, PAIRS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    last = True
    if APART:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        mine = partial + (program * parts).to(tl.int64) * size
        mine += tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(mine + first_part * size, total, mask=m_in[None, :])
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == parts - 1
        if last:
            total = tl.zeros([BLOCK_N, BLOCK_M], kind)
            for part in range(parts):
                total += tl.load(mine + part * size, mask=m_in[None, :], other=0, cache_modifier=".cg")
            tl.store(arrived + program, 0)
    if last:
        y, scale = total.to(tl.float32), tl.full([BLOCK_N, 1], 1.0, tl.float32)
        if ROW_SCALES:
            scale = tl.load(row_scales + n, mask=n_in, other=0.0)[:, None]
        if EXACT:
            y *= scale
            scale = tl.load(x_scales + m, mask=m_in, other=0.0)[None, :]
        added = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BIAS:
            added += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
        inside = n_in[:, None] & m_in[None, :]
        target = m.to(tl.int64)[None, :] * width + n[:, None]
        if RESIDUAL:
            added += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        y = scaled_plus(y, scale, added)
        tl.store(out + target, y.to(out.dtype.element_ty), mask=inside)


def groups_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, x_scales: Tensor | None,
    tile: Tile,
) -> None:  # fmt: skip
    """x [M, K] with contiguous rows times the weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out.

    With x_scales, float32 [M], x is int8 and the weight INT8 with a scale per row. Can be captured after `arrivals` was
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
    assert weight.words != exact
    assert not exact or (x.dtype == torch.int8 and weight.kind is Kind.INT8 and weight.scales is None)
    if rows == 0:
        return
    tiles, parts = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n), -(-depth // tile.part_len)
    apart = parts > 1 and tiles < UNITS
    partial = out
    if apart:
        size = tiles * parts * tile.block_m * tile.block_n
        partial = torch.empty(size, dtype=torch.int32 if exact else torch.float32, device=x.device)
    kind = KINDS[weight.kind]
    codes_kernel[(tiles, parts if apart else 1)](
        out, partial, arrivals(x.device) if apart else out, x, weight.codes,
        out if weight.scales is None else weight.scales, out if weight.zeros is None else weight.zeros,
        out if weight.row_scales is None else weight.row_scales, out if x_scales is None else x_scales,
        out if bias is None else bias, out if residual is None else residual,
        rows, width, depth, weight.codes.shape[1], -(-depth // weight.group), x.stride(0), parts, tile.part_len,
        KIND=kind, GROUP=weight.group, SCALES=weight.scales is not None, ZEROS=weight.zeros is not None,
        ROW_SCALES=weight.row_scales is not None, EXACT=exact, BIAS=bias is not None, RESIDUAL=residual is not None,
        APART=apart, ON_SUMS=scales_sums(kind, weight.group, tile.block_k), PAIRS=makes_pairs(x),
        EVEN=depth % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PREFETCH=PREFETCH if overlaps() else 0, num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
    )  # fmt: skip


def makes_pairs(x: Tensor) -> bool:
    """Whether instructions widen two codes at a time: the constant PAIRS."""
    return x.is_cuda and x.dtype is torch.bfloat16 and target().runs_ptx


def tile_of(rows: int | None, width: int, depth: int, kind: Kind, group: int, size: int, stages: int) -> Tile:
    """The tile for `rows` rows (None: any number, with --deterministic) of `size` bytes per value.

    Measured on an H100 with the products of Qwen3-8B: 4-bit codes need tall tiles and many programs, 8-bit codes more
    loads in flight; `stages` is the device's maximum of these. For 65 to 512 rows with 4-bit codes a tile has 64
    tokens: two programs share a unit, and one multiplies while the other widens.
    """
    block_k, four = block_k_of(KINDS[kind], group, size), codes_per_word(KINDS[kind]) == 4
    if rows is None or size > 2:
        parts = max(1, min(-(-UNITS // triton.cdiv(width, 64)), depth // 512))
        return Tile(64, 64, block_k, parts_of(depth, parts, block_k), stages, 4)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 or four else 128
    if four or block_m == 128:
        tiles = triton.cdiv(rows, block_m) * triton.cdiv(width, 128)
        parts = round((384 if block_m == 16 else 256 if block_m == 32 else 192) / tiles)
        return Tile(block_m, 128, block_k, parts_of(depth, min(parts, depth // 512), block_k), stages, 8)
    parts = depth // (1024 if block_m < 64 else 2048)
    return Tile(block_m, 64, block_k, parts_of(depth, parts, block_k), stages if stages < 3 else 5, 4)


def parts_of(depth: int, parts: int, block_k: int) -> int:
    """Columns per part, rounded up to whole blocks."""
    return triton.cdiv(triton.cdiv(depth, max(1, parts)), block_k) * block_k


def tile_for(x: Tensor, weight: Packed, invariant: bool = False) -> Tile:
    """The tile for rows x [M, K] times this weight on this device."""
    stages = 3 if target().loads_past_registers else 2
    rows = None if invariant else len(x)
    return tile_of(rows, len(weight.codes), weight.depth, weight.kind, weight.group, x.itemsize, stages)


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
