"""The gated product of up to 128 rows in one wave: y = activate(x gate^T + b, x up^T + c).

With so few rows the time depends on the bytes read: the weights from memory, and the rows repeatedly from the L2 cache.
A tile with all rows reads each weight once, and wider tiles read the rows less often. An inner width of 12,288 makes
128 tiles of 96 columns of gate and 96 of up: one wave on nearly all units of a card, so that no program needs a second
tile as in gemm/gated_persistent. A unit's registers hold sums of up to 144 columns: 18,944 columns make 132 tiles. The
sides of blocks are powers of two, so a tile is two blocks of columns, 64 and 32 or 128 and 16, that multiply the same
rows. Users: gemm/dispatch on accelerators that load blocks by descriptors, for the weights and rows that kernels/tune
names.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.descriptors import describe, is_aligned
from engine.kernels.gemm.gated_persistent import gated_reference, launch_gated
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import tl, triton

MAX_ROWS = 128  # rows of the single tile of rows


class Columns(NamedTuple):
    """The columns of gate, and as many of up, in a tile's two blocks."""

    first: int
    second: int


NARROW, WIDE = Columns(64, 32), Columns(128, 16)
MOST_NARROW = 132 * sum(NARROW)  # columns: more tiles would be a second wave on sm_90
BLOCK_K, STAGES, WARPS = 64, 4, 8
SHARED_MEMORY = 213056  # most bytes per program: four stages, and 64 bytes for their barriers


@triton.jit
def product_of(tokens, weight, n, k, sums, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """sums [BLOCK_M, 2 * BLOCK_N] + tokens times BLOCK_N rows of gate and of up, from (n, k) on."""
    return tl.dot(tokens, weight.load([0, n, k]).reshape((2 * BLOCK_N, BLOCK_K)).T, sums, input_precision="ieee")


@triton.jit
def store_gated(
    out, bias, sums, n, width, BIAS: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores one block of the result, from column n on; sums [BLOCK_M, 2 * BLOCK_N], gate first."""
    gate, up = sums.reshape((BLOCK_M, 2, BLOCK_N)).permute((0, 2, 1)).split()
    if BIAS:
        column = n + tl.arange(0, BLOCK_N)
        gate += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    out.store([0, n], activate(gate, up, ACT).to(out.dtype))


@triton.jit
def one_wave_kernel(
    out,  # [rows, width] in blocks [BLOCK_M, FIRST]
    out_rest,  # the same in blocks [BLOCK_M, SECOND]
    x,  # [rows, depth] in blocks [BLOCK_M, BLOCK_K]
    weight,  # [2, width, depth] in blocks [2, FIRST, BLOCK_K]
    weight_rest,  # the same in blocks [2, SECOND, BLOCK_K]
    bias,  # [2 * width] when BIAS
    width,
    depth,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,  # an Activation
    BLOCK_M: tl.constexpr,  # rows or more
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes FIRST + SECOND columns of all rows per program; reads beyond the edges give zeros."""
    grid_wait(OVERLAP)
    n = tl.program_id(0) * (FIRST + SECOND)
    tl.assume(depth > 0)
    sums = tl.zeros([BLOCK_M, 2 * FIRST], tl.float32)
    rest = tl.zeros([BLOCK_M, 2 * SECOND], tl.float32)
    for k in tl.range(0, depth, BLOCK_K):
        tokens = x.load([0, k])
        sums = product_of(tokens, weight, n, k, sums, FIRST, BLOCK_K)
        rest = product_of(tokens, weight_rest, n + FIRST, k, rest, SECOND, BLOCK_K)
    store_gated(out, bias, sums, n, width, BIAS, ACT, BLOCK_M, FIRST)
    store_gated(out_rest, bias, rest, n + FIRST, width, BIAS, ACT, BLOCK_M, SECOND)


def one_wave_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: Activation) -> None:
    """x [M, K] with contiguous rows, 1 <= M <= 128, times weight [2N, K], gate first, into out [M, N]; bias [2N].

    All tensors have the same 2-byte dtype; all but x are contiguous. Rows that are not 16-byte aligned are left to
    gemm/gated_persistent, which can load by pointers. Can be captured.
    """
    if not x.is_cuda:
        gated_reference(x, weight, bias, out, activation)
    elif all(is_aligned(tensor) for tensor in (out, x, weight)):
        launch_one_wave(x, weight, bias, out, activation)
    else:
        launch_gated(x, weight, bias, out, activation)


def launch_one_wave(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: Activation) -> None:
    """The Triton kernel; arguments as `one_wave_product`, all aligned."""
    rows, depth = x.shape
    width = out.shape[1]
    assert 0 < rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    assert weight.shape == (2 * width, depth), f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}, width {width}"
    assert out.shape == (rows, width) and all(is_aligned(tensor) for tensor in (out, x, weight))
    both, (first, second) = weight.view(2, width, depth), columns_of(width)
    one_wave_kernel[(triton.cdiv(width, first + second),)](  # descriptors pass by value, so a graph holds them
        describe(out, MAX_ROWS, first), describe(out, MAX_ROWS, second), describe(x, MAX_ROWS, BLOCK_K),
        describe(both, 2, first, BLOCK_K), describe(both, 2, second, BLOCK_K), out if bias is None else bias,
        width, depth, BIAS=bias is not None, ACT=int(activation), BLOCK_M=MAX_ROWS, FIRST=first, SECOND=second,
        BLOCK_K=BLOCK_K, num_warps=WARPS, num_stages=STAGES, **launch_options(),
    )  # fmt: skip


def columns_of(width: int) -> Columns:
    """The Columns of the tiles for a result of `width` columns."""
    return WIDE if width > MOST_NARROW else NARROW
