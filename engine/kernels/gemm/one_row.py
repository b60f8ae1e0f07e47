"""Products of one row with 4-bit codes: y = W x (+ bias) (+ residual), by multiply-adds in float32.

    y[n] = row_scale[n] sum_g scale[n, g] (sum_(k in g) code[n, k] x[k]  -  (8 + zero[n, g]) sum_(k in g) x[k])

Matrix units need 16 rows, and tiles of codes for them go through shared memory and barriers, which took twice the time
of reading the codes. Here a thread holds words of codes and the matching columns of x, and shared memory is used only
for the sums of groups. A code costs two instructions, a mask and a multiply-add, because its bits are used in place as
a float: c << b is c * 2^(b - 149), a denormal float32. x is multiplied by the inverse power of two, which is exact for
magnitudes of x up to 2^47.

An RMSNorm between two such products is fused into both (gemm/epilogue). A gated product ends with its activation.
Users: gemm/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, activate_reference
from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.epilogue import Unscaled, empty_unscaled, padded
from engine.kernels.gemm.groups import Packed
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

CODES = 8  # codes per 32-bit word
PROGRAMS = 4  # programs per unit, limited by its registers
NEAR = tl.constexpr(2.0**80)  # factor of x before it multiplies codes; keeps products within float32's range
FAR = tl.constexpr(2.0**69)  # 2^149 / NEAR


class Cut(NamedTuple):
    """How a product of one row is divided."""

    block_n: int  # weight rows per program; for a gated product, rows of gate and as many of up
    words: int  # words of a row that are read at a time
    warps: int
    blocks: int = 1  # blocks of block_n rows for which a program reads x once; above 1 only if `words` hold a whole row


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pair_at(x, at, depth):
    """Columns 2 * at and 2 * at + 1 of bfloat16 x, loaded as one word: two float32, 0 from `depth` on."""
    both = tl.load(x + at, mask=at * 2 < depth, other=0)
    return as_float(both << 16), as_float(both & -65536)


@triton.jit
def columns_of(x, first, depth, HALF: tl.constexpr, WORDS: tl.constexpr):
    """The columns of x for codes 2 * HALF and 2 * HALF + 1 of each 16 bits of WORDS words, from word `first` on: a
    tuple of four float32 [WORDS], alternating between the lower and the upper 16 bits."""
    word = tl.arange(0, WORDS)
    at = first * 4 + word // 8 * 32 + word % 8 + 16 * HALF
    even, odd = pair_at(x, at, depth)
    next_even, next_odd = pair_at(x, at + 8, depth)
    return even, odd, next_even, next_odd


@triton.jit
def meet(tile, columns, FIRST: tl.constexpr):
    """Codes from FIRST on of each 16 bits of the words, times their columns: float32 [rows, words], scaled by
    NEAR * 2^-149."""
    sums = tl.zeros(tile.shape, tl.float32)
    for number in tl.static_range(len(columns)):
        sums = met(sums, tile, columns[number], FIRST + number // 2 + 4 * (number % 2))
    return sums


@triton.jit
def met(sums, tile, x, AT: tl.constexpr):
    """sums + (code number AT of each word) * x [words]."""
    # Bits inside the mantissa are used in place; higher ones are shifted down by 12 first.
    LOW: tl.constexpr = 4 * AT if AT < 5 else 4 * AT - 12
    words = tile if AT < 5 else tile >> 12
    return sums + as_float(words & (15 << LOW)) * (x * (NEAR / (1 << LOW)))[None, :]


@triton.jit
def sum_of(columns):
    """[words]: the sum of each word's columns."""
    total = columns[0]
    for number in tl.static_range(1, len(columns)):
        total += columns[number]
    return total


@triton.jit
def by_groups(values, COUNT: tl.constexpr):
    """Sums of COUNT adjacent words: [rows, words] -> [rows, words / COUNT]; [words] -> [1, words / COUNT]."""
    GROUPS: tl.constexpr = values.shape[-1] // COUNT
    return tl.sum(values.reshape((values.numel // (GROUPS * COUNT), GROUPS, COUNT)), 2)


@triton.jit
def in_groups(
    tile, columns, scales, zeros, n, n_in, group, groups, COUNT: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """(Codes from FIRST on of each 16 bits - zeros) * scales: sums of COUNT words, [rows, words / COUNT]."""
    value = by_groups(meet(tile, columns, FIRST), COUNT) * FAR
    at, inside = n.to(tl.int64)[:, None] * groups + group[None, :], n_in[:, None] & (group < groups)[None, :]
    less = by_groups(sum_of(columns), COUNT)
    value -= 8.0 * less
    if zeros is not None:
        value -= tl.load(zeros + at, mask=inside, other=0).to(tl.float32) * less
    if scales is not None:
        value *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def turn(
    tile, low, high, scales, zeros, n, n_in, first, groups, GROUP: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """One iteration: the words from `first` on of rows n, times their columns: [rows, words / COUNT]."""
    group = first // COUNT + tl.arange(0, tile.shape[1] // COUNT)
    if scales is not None and GROUP == 32:
        value = in_groups(tile, low, scales, zeros, n, n_in, group * 2, groups, COUNT, 0)
        value += in_groups(tile, high, scales, zeros, n, n_in, group * 2 + 1, groups, COUNT, 2)
    else:
        value = in_groups(tile, low + high, scales, zeros, n, n_in, group, groups, COUNT, 0)
    return value


@triton.jit
def one_row_kernel(
    out,  # [width]
    gained,  # [width] out * gain, or None
    counted,  # [programs] float32: sums of squares of out; with `gained`
    x,  # [depth / 2] int32: pairs of bfloat16
    words,  # [width, line] int32 of gemm/widen; when GATED [2 * width, line]
    scales,  # [.., groups], or None
    zeros,  # [.., groups], or None
    row_scales,  # [..] float32, or None
    bias,  # [..] or None
    residual,  # [width], or None; may be out
    gain,  # [width] float32, with `gained`
    squares,  # [parts] float32: x is Unscaled; or None
    width,
    depth,
    line,
    groups,
    blocks,  # blocks per program
    parts,
    eps,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    PARTS: tl.constexpr,  # power of two >= parts
    ONCE: tl.constexpr,  # an iteration reads a whole row, and the columns of x stay in registers
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes `blocks` times BLOCK_N results per program; the next block's words are loaded meanwhile."""
    ROWS: tl.constexpr = BLOCK_N * (2 if GATED else 1)
    # Words that are summed to one number per iteration: the words of a group, at least 64 columns.
    COUNT: tl.constexpr = 4 if scales is None else 8 if GROUP < 64 else GROUP // 8
    row, word, column = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * blocks * BLOCK_N
    piece = start + row % BLOCK_N
    tile = tl.load(
        words + (piece + row // BLOCK_N * width).to(tl.int64)[:, None] * line + word[None, :],
        mask=(piece < width)[:, None] & (word < line)[None, :],
        other=0,
    )
    grid_wait(OVERLAP)
    scale = 1.0
    if squares is not None:
        part = tl.arange(0, PARTS)
        scale = 1.0 / tl.sqrt_rn(tl.sum(tl.load(squares + part, mask=part < parts, other=0.0), 0) / depth + eps)
    if ONCE:
        low, high = columns_of(x, 0, depth, 0, WORDS), columns_of(x, 0, depth, 1, WORDS)
    squared = 0.0
    for block in range(blocks):
        piece = start + block * BLOCK_N + row % BLOCK_N
        n, n_in = piece + row // BLOCK_N * width, piece < width
        if ONCE:
            behind = piece + BLOCK_N
            next_at = (behind + row // BLOCK_N * width).to(tl.int64)[:, None] * line + word[None, :]
            inside = (behind < tl.minimum(width, start + blocks * BLOCK_N))[:, None] & (word < line)[None, :]
            following = tl.load(words + next_at, mask=inside, other=0)
            total = turn(tile, low, high, scales, zeros, n, n_in, 0, groups, GROUP, COUNT)
            tile = following
        else:
            total = tl.zeros([ROWS, WORDS // COUNT], tl.float32)
            for first in range(0, line, WORDS):
                low, high = columns_of(x, first, depth, 0, WORDS), columns_of(x, first, depth, 1, WORDS)
                total += turn(tile, low, high, scales, zeros, n, n_in, first, groups, GROUP, COUNT)
                behind = first + WORDS + word
                inside = n_in[:, None] & (behind < line)[None, :]
                tile = tl.load(words + n.to(tl.int64)[:, None] * line + behind[None, :], mask=inside, other=0)
        y = tl.sum(total, 1) * scale
        if row_scales is not None:
            y *= tl.load(row_scales + n, mask=n_in, other=0.0)
        if bias is not None:
            y += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
        if GATED:
            gate, up = tl.split(y.reshape((2, BLOCK_N)).permute((1, 0)))
            y = activate(gate, up, ACT)
        at = start + block * BLOCK_N + column
        if residual is not None:
            y += tl.load(residual + at, mask=at < width, other=0.0).to(tl.float32)
        kept = y.to(out.dtype.element_ty)
        tl.store(out + at, kept, mask=at < width)
        if gained is not None:
            kept = tl.where(at < width, kept.to(tl.float32), 0.0)
            squared += tl.sum(kept * kept, 0)
            more_gain = tl.load(gain + at, mask=at < width, other=0.0)
            tl.store(gained + at, (kept * more_gain).to(out.dtype.element_ty), mask=at < width)
    if gained is not None:
        tl.store(counted + tl.program_id(0), squared)


def suits(weight: Packed) -> bool:
    """Whether the kernel supports such codes."""
    grouped = weight.scales is not None and weight.group >= 32 and weight.group & (weight.group - 1) == 0
    alone = weight.scales is None and weight.zeros is None
    return weight.kind is Kind.INT4 and weight.words and (grouped or alone)


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies these rows [M, K] on this device."""
    if len(x) != 1 or not x.is_cuda or x.dtype is not torch.bfloat16 or not target().runs_ptx:
        return False
    return suits(weight) and x.shape[1] % 2 == 0 and x.data_ptr() % 4 == 0


def cut_of(width: int, depth: int, group: int, gated: bool) -> Cut:
    """The division of a product."""
    words = max(512 if depth > 2048 else 256 if depth > 1024 else 128, group // CODES)
    programs = PROGRAMS * target().num_units
    block_n = 4 if gated else 8 if width > 8 * programs else 16
    once = depth <= words * CODES  # then a program reads the columns of x once for all its blocks
    blocks = triton.cdiv(triton.cdiv(width, block_n), programs) if once else 1
    return Cut(block_n, words, max(1, min(8, words // 128)), blocks)


def one_row_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None = None, before: Unscaled | None = None, after: Unscaled | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """x [1, K] times the weight [N, K] into out [1, N]; bias [N]; residual [1, N], may be out. Can be captured.

    With an activation the weight is [2N, K], gate first. With `before`, x is its rows. `after`, from `empty_after`,
    gets the data for the norm of out.
    """
    launch = launch_one_row_product if x.is_cuda else one_row_product_reference
    launch(x, weight, bias, residual, out, activation, before, after, cut)


def empty_after(out: Tensor, weight: Packed, gain: Tensor, eps: float) -> Unscaled | None:
    """Memory for `after` of a product into out [1, N], with the same cut."""
    cut = cut_of(len(weight.codes), weight.depth, weight.group, False)
    return empty_unscaled(out, cut.block_n * cut.blocks, gain, eps)


def launch_one_row_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None = None, before: Unscaled | None = None, after: Unscaled | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `one_row_product`."""
    (_, depth), gated = x.shape, activation is not None
    width = len(weight.codes) // (2 if gated else 1)
    assert suits(weight) and x.shape == (1, weight.depth) and x.dtype is torch.bfloat16 and depth % 2 == 0
    assert out.shape == (1, width) and out.is_contiguous() and (residual is None or residual.is_contiguous())
    cut = cut or cut_of(width, depth, weight.group, gated)
    once = depth <= cut.words * CODES
    assert once or cut.blocks == 1
    programs, words = triton.cdiv(width, cut.block_n * cut.blocks), weight.codes.view(torch.int32)
    assert after is None or len(after.squares) == programs
    parts = 0 if before is None else len(before.squares)
    one_row_kernel[(programs,)](
        out, None if after is None else after.rows, None if after is None else after.squares, x.view(torch.int32),
        words, weight.scales, weight.zeros, weight.row_scales, bias, residual, None if after is None else after.gain,
        None if before is None else before.squares, width, depth, words.shape[1], -(-depth // weight.group),
        cut.blocks, parts, 0.0 if before is None else before.eps, GROUP=weight.group,
        GATED=gated, ACT=int(activation or 0), PARTS=padded(parts, 1) if parts else 0, ONCE=once,
        BLOCK_N=cut.block_n, WORDS=cut.words, num_warps=cut.warps, num_stages=1, **launch_options(),
    )  # fmt: skip


def one_row_product_reference(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    activation: Activation | None = None, before: Unscaled | None = None, after: Unscaled | None = None,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    x = x.to(wide)
    if before is not None:
        x = x * torch.rsqrt(before.squares.to(wide).sum(0) / x.shape[1] + before.eps)[:, None]
    y = torch.nn.functional.linear(x, weight.dense().to(wide), None if bias is None else bias.to(wide))
    y = y if activation is None else activate_reference(y, activation)
    out.copy_(y if residual is None else y + residual)
    if after is not None:
        after.rows.copy_(out.to(wide) * after.gain)
        after.squares.zero_()[0] = out.to(wide).square().sum(1)
