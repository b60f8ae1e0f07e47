"""Widens a quantised matrix completely: wide[n, k] = (value(code[n, k]) - zero) * scale * row_scale[n].

Computed in float32 and rounded once. Users: gemm/long_products, which multiplies many rows by `wide`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.codes import Kind
from engine.kernels.gemm.groups import KINDS, Packed
from engine.kernels.gemm.widen import values_less, values_of
from engine.kernels.target import target, tl, triton

ELEMENTS = 4096  # elements per program


def block_k_of(group: int) -> int:
    """Columns per program: if possible a divisor of the group, so that each row reads one scale."""
    return max((size for size in (64, 128, 256) if group % size == 0), default=256)


@triton.jit
def scaled(
    tile, n, group, scales, zeros, inside, groups, KIND: tl.constexpr, PLACE: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(values - zeros) * scales of code number PLACE of words [n, words], for `group`, [1] or [words]: float32."""
    at = (n * groups)[:, None] + group[None, :]
    if ZEROS:
        zero = tl.load(zeros + at, mask=inside, other=0)
        if zero.dtype == tl.int8:
            values = values_less(tile, zero, tl.float32, KIND, PLACE, PAIRS).to(tl.float32)
        else:
            values = values_of(tile, tl.float32, KIND, PLACE, PAIRS).to(tl.float32) - zero
    else:
        values = values_of(tile, tl.float32, KIND, PLACE, PAIRS).to(tl.float32)
    if SCALES:
        values *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def widen_weight_kernel(
    out,  # [width, depth]
    words,  # gemm/widen's words [width, line]
    scales,  # [width, groups] when SCALES
    zeros,  # [width, groups] int8 or float32 when ZEROS
    row_scales,  # [width] float32 when ROW_SCALES
    width,
    depth,
    line,
    groups,
    KIND: tl.constexpr,  # a kind of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    PAIRS: tl.constexpr,  # units make two values of two words at a time
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N rows and BLOCK_K columns per program."""
    PER: tl.constexpr = 4 if KIND < 3 else 2  # codes of a word
    APART: tl.constexpr = 64 // PER  # columns between two codes of a word
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first, n_in = tl.program_id(1) * BLOCK_K, n < width
    j = tl.arange(0, BLOCK_K // PER)
    word = first // PER + j
    tile = tl.load(words + (n * line)[:, None] + word[None, :], mask=n_in[:, None] & (word < line)[None, :], other=0)
    for place in tl.static_range(PER):
        columns = first + j // APART * 64 + j % APART + place * APART
        inside = n_in[:, None] & (columns < depth)[None, :]
        if GROUP % BLOCK_K == 0:
            group = first // GROUP + tl.arange(0, 1)
            values = scaled(tile, n, group, scales, zeros, n_in[:, None], groups, KIND, place, SCALES, ZEROS, PAIRS)
        else:
            group = columns // GROUP
            values = scaled(tile, n, group, scales, zeros, inside, groups, KIND, place, SCALES, ZEROS, PAIRS)
        if ROW_SCALES:
            values *= tl.load(row_scales + n, mask=n_in, other=0.0)[:, None]
        tl.store(out + (n * depth)[:, None] + columns[None, :], values.to(out.dtype.element_ty), mask=inside)


def widen_weight(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The weight as a new matrix [N, K]."""
    return launch_widen_weight(weight, dtype) if weight.codes.is_cuda else widen_weight_reference(weight, dtype)


def launch_widen_weight(weight: Packed, dtype: torch.dtype) -> Tensor:
    """The kernel. It must not overlap with the next product, which may read its weight early (kernels/pdl)."""
    (width, line), depth = weight.codes.shape, weight.depth
    out = torch.empty(width, depth, dtype=dtype, device=weight.codes.device)
    block_k = block_k_of(weight.group)
    block_n = ELEMENTS // block_k
    # Pairs are bfloat16, which is exact for all kinds but NF4.
    pairs = weight.codes.is_cuda and target().runs_ptx and weight.kind is not Kind.NF4
    widen_weight_kernel[(triton.cdiv(width, block_n), triton.cdiv(depth, block_k))](
        out, weight.codes, out if weight.scales is None else weight.scales,
        out if weight.zeros is None else weight.zeros, out if weight.row_scales is None else weight.row_scales,
        width, depth, line, -(-depth // weight.group), KIND=KINDS[weight.kind], GROUP=weight.group,
        SCALES=weight.scales is not None, ZEROS=weight.zeros is not None, ROW_SCALES=weight.row_scales is not None,
        PAIRS=pairs, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out


def widen_weight_reference(weight: Packed, dtype: torch.dtype) -> Tensor:
    return weight.dense().to(dtype)
