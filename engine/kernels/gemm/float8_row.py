"""Products of one row of FP8 codes by FP8 codes, by multiply-adds in float32: gemm/float8 without matrix units.

    rows     y[n] = s_x s_w[n] sum_k x[k] w[n, k]
    blocks   y[n] = sum_b s_x[b] s_w[n, b] sum_(k in b) x[k] w[n, k]       b: 128 columns

Both sides are e4m3. With one row the time is the reading of the weight, and a thread's loads pass no shared memory
before the last sums (gemm/one_row). A code becomes a float32 by a shift and a mask, off by 2^120: its exponent and
mantissa are the upper end of float32's, also where the code is below e4m3's least normal number. Products of codes are
exact, and so are sums but for float32's rounding. Users: gemm/float8_weight.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.float8 import BLOCK, Tile, float8_product_reference
from engine.kernels.gemm.groups import Packed
from engine.kernels.gemm.one_row import Cut, as_float, by_groups
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import target, tl, triton

WORD = 4  # codes of a word of 32 bits
CUT = Cut(8, 512, 4)  # the fastest or near it of those tried with the 8B's four products on an H100
PER = tl.constexpr(BLOCK // WORD)  # words of 128 columns


@triton.jit
def code_at(words, AT: tl.constexpr):
    """Code number AT of each word as float32, times 2^-120."""
    first = words << (24 - 8 * AT)
    return as_float((first >> 4) & -0x78100000)  # the shift keeps the sign; the mask drops its copies


@triton.jit
def input_at(words, AT: tl.constexpr):
    """The same of x, times 2^60, and NaN where the code is NaN."""
    value = code_at(words, AT)
    isnan = (words >> 8 * AT & 0x7F) == 0x7F
    return tl.where(isnan, float("nan"), value * 2.0**120 * 2.0**60)


@triton.jit
def float8_row_kernel(
    out,  # [width]
    x,  # [depth / 4] int32 words of codes
    x_scales,  # [groups] float32
    words,  # [width, line] int32
    scales,  # [width, groups]
    bias,  # [width] or None
    residual,  # [width], or None; may be out
    width,
    line,
    groups,  # of 128 columns when BLOCKED, else 1
    BLOCKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N results per program."""
    n, word = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    n_in = n < width
    word_at = words + n.to(tl.int64)[:, None] * line + word[None, :]
    tile = tl.load(word_at, mask=n_in[:, None] & (word < line)[None, :], other=0)
    grid_wait(OVERLAP)
    total = tl.zeros([BLOCK_N, WORDS // PER], tl.float32)
    for first in range(0, line, WORDS):
        tokens = tl.load(x + first + word, mask=first + word < line, other=0)
        sums = tl.zeros([BLOCK_N, WORDS], tl.float32)
        for at in tl.static_range(4):
            sums += code_at(tile, at) * input_at(tokens, at)[None, :]
        value = by_groups(sums, PER)
        if BLOCKED:
            group = first // PER + tl.arange(0, WORDS // PER)
            inside = group < groups
            at_scale, both = scales + n.to(tl.int64)[:, None] * groups + group[None, :], n_in[:, None] & inside[None, :]
            value *= tl.load(at_scale, mask=both, other=0.0).to(tl.float32)
            value *= tl.load(x_scales + group, mask=inside, other=0.0)[None, :]
        total += value
        behind = first + WORDS + word
        tile = tl.load(word_at + first + WORDS, mask=n_in[:, None] & (behind < line)[None, :], other=0)
    y = tl.sum(total, 1) * 2.0**60
    if not BLOCKED:
        y *= tl.load(scales + n, mask=n_in, other=0.0).to(tl.float32) * tl.load(x_scales)
    if bias is not None:
        y += tl.load(bias + n, mask=n_in, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + n, mask=n_in, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n_in)


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel multiplies these rows of codes [M, K] on this device."""
    return len(x) == 1 and x.is_cuda and target().runs_ptx and weight.depth % (4 * WORD) == 0


def float8_row_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """Codes x [1, K] and x_scales [groups, 1] times the weight [N, K] into out [1, N]; residual [1, N], may be out."""
    if x.is_cuda:
        launch_float8_row_product(x, x_scales, weight, bias, residual, out, cut)
    else:
        float8_product_reference(x, x_scales, weight, bias, residual, out, Tile(16, 64, BLOCK, BLOCK, 1, 4))


def launch_float8_row_product(
    x: Tensor, x_scales: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    cut: Cut | None = None,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `float8_row_product`."""
    (rows, depth), width, blocked = x.shape, len(weight.codes), weight.scales is not None
    scales = weight.row_scales if weight.scales is None else weight.scales
    groups = -(-depth // BLOCK) if blocked else 1
    assert rows == 1 and x.is_contiguous() and depth == weight.depth and depth % WORD == 0
    assert scales is not None and (blocked == (weight.row_scales is None)) and scales.numel() == width * groups
    assert x_scales.shape == (groups, 1) and x_scales.is_contiguous() and out.shape == (1, width)
    cut = cut or CUT
    words = weight.codes.view(torch.int32)
    float8_row_kernel[(triton.cdiv(width, cut.block_n),)](
        out, x.view(torch.int32), x_scales, words, scales, bias, residual, width, words.shape[1], groups,
        BLOCKED=blocked, BLOCK_N=cut.block_n, WORDS=cut.words, num_warps=cut.warps, num_stages=1, **launch_options(),
    )  # fmt: skip
