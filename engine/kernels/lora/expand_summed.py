"""Expand of the experts' second product, and the sum of each token's experts, in one kernel for few pairs.

    out[t] = sum over k of weight[t, k] * (made[t, k] + B low[t, k]) (+ shared[t]) (+ residual[t])

The same as `expand` followed by kernels/moe/combine: a pair's result is rounded before the sum, which is rounded once.
A program computes one block of columns of one token, for all experts of the token at once. It may also prescale the row
for a norm, and compute A x of the layer behind the norm (kernels/lora/next_low). Users: engine/layers/placed_device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.gemm.epilogue import Unscaled, padded
from engine.kernels.lora.expand import BLOCK_N, expand_reference, lows_of
from engine.kernels.lora.matrices import PlaceMatrices, SiteShape
from engine.kernels.lora.next_low import NextLow, next_constants, next_low_reference, next_matrix, write_next_low
from engine.kernels.lora.rows import PlaceList, block_of, key_of
from engine.kernels.moe.combine import Summands, combine_reference, with_rest
from engine.kernels.pdl import launch_options, let_next_start, wait_alone
from engine.kernels.target import tl, triton

MOST_VALUES = 1 << 14  # values of all experts of a token that a program holds: 64 per thread


@triton.jit(do_not_specialize=["rows", "parts", "site", "next_site"])
def expand_summed_kernel(
    out,  # [rows, width]; may be residual
    gained,  # [rows, width] out * gain when AFTER
    counted,  # [num_blocks, rows] float32: sums of squares of out when AFTER
    next_low,  # [num_blocks, rows, NEXT, RANK] float32: A x of the layer behind the norm, when NEXT
    made,  # [rows, TOP_K, width]
    low,  # [parts, rows * TOP_K, RANK] float32
    values,  # [places, place_len]
    words,  # [places, sites] int64
    numbers,  # [rows] int32: places
    chosen,  # [rows, TOP_K] int32: experts
    weights,  # [rows, TOP_K] float32, or None
    shared,  # [rows, width], or None
    gate,  # [rows], or None
    residual,  # [rows, width], or None
    gain,  # [width] float32 when AFTER
    count,  # [1] int32, or None
    rows,
    parts,
    depth,
    width,
    experts,
    sites,
    site,
    place_len,
    next_site,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # power of two >= TOP_K
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOWS: tl.constexpr,  # of lows_of
    AFTER: tl.constexpr,
    NEXT: tl.constexpr,  # pieces of the layer behind the norm; 0: its A x is not computed
    LINES: tl.constexpr,  # power of two >= NEXT * RANK
    OVERLAP: tl.constexpr,
):
    """A program computes one token and one block of columns."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, slot, r = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, SLOTS), tl.arange(0, RANK)
    n_in, slot_in = n < width, slot < TOP_K
    let_next_start(OVERLAP)
    number = tl.load(numbers + row, cache_modifier=".cg")
    expert = tl.load(chosen + row * TOP_K + slot, mask=slot_in, other=experts, cache_modifier=".cg")
    key = key_of(number, expert, experts)
    place, expert = tl.maximum(key - 1, 0) // experts, tl.maximum(key - 1, 0) % experts
    word = tl.load(words + place * sites + site, cache_modifier=".cg")
    rank = tl.multiple_of(tl.where(key > 0, word & 0xFFFF, 0).to(tl.int32), 16)
    r_in = r[None, :] < rank[:, None]
    b = values + place.to(tl.int64) * place_len + tl.multiple_of(word >> 16, 64)
    b += rank.to(tl.int64) * (experts * depth + expert * width)  # A of all experts, and B of lower experts
    b_at = b[None, :, None] + n.to(tl.int64)[:, None, None] * rank[None, :, None] + r[None, None, :]
    matrix = tl.load(b_at, mask=n_in[:, None, None] & r_in[None, :, :], other=0.0)  # [BLOCK_N, SLOTS, RANK]
    if NEXT:
        next_a, lines_in = next_matrix(
            values, words, number, n, n_in, NEXT, width, 1, sites, next_site, place_len, RANK, LINES
        )
    if AFTER:
        gains = tl.load(gain + n, mask=n_in, other=0.0)
    wait_alone(OVERLAP)  # the adapter's matrices are weights, and the shrink before has waited for the experts
    pair, at, live = row * TOP_K + slot, row * width + n, width
    lows = tl.zeros([BLOCK_N, SLOTS, RANK], tl.float32)  # B's shape, so that both have one layout
    for turn in tl.static_range(LOWS):
        part = turn * BLOCK_N + tl.arange(0, BLOCK_N)
        low_at = (part.to(tl.int64)[:, None] * rows * TOP_K + pair[None, :]) * RANK
        low_in = (part < parts)[:, None, None] & r_in[None, :, :]
        lows += tl.load(low + low_at[:, :, None] + r[None, None, :], mask=low_in, other=0.0)
    if count is not None:
        live = tl.where(row < tl.load(count), width, 0)
    if weights is not None:
        factors = tl.load(weights + pair, mask=slot_in, other=0.0)
    made_in = n_in[:, None] & slot_in[None, :]  # of padding rows too, since `count` arrives with the values
    each = tl.load(made + pair[None, :] * width + n[:, None], mask=made_in, other=0.0).to(tl.float32)
    rest = with_rest(tl.zeros([BLOCK_N], tl.float32), shared, gate, residual, row, at, n_in)
    real = (n < live)[:, None] & slot_in[None, :]
    sums = tl.sum(lows, 0).to(matrix.dtype).to(tl.float32)
    each += tl.sum(matrix.to(tl.float32) * sums[None, :, :], 2)
    each = tl.where(real, each, 0.0).to(made.dtype.element_ty).to(tl.float32)
    if weights is not None:
        each *= factors[None, :]
    rounded = (tl.sum(each, 1) + rest).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=n_in)
    if AFTER:
        written = tl.where(n_in, rounded.to(tl.float32), 0.0)
        tl.store(counted + block * rows + row, tl.sum(written * written, 0))
        scaled = (written * gains).to(out.dtype.element_ty)
        tl.store(gained + at, scaled, mask=n_in)
        if NEXT:
            write_next_low(next_low, next_a, lines_in, scaled, block, row, rows, NEXT, RANK, LINES)


def sums_at_once(listed: PlaceList, low: Tensor) -> bool:
    """Whether `expand_summed` takes the pairs of this list; low: [parts, pairs, 1, RANK]."""
    parts, _, _, rank = low.shape
    slots = padded(listed.each, 1)
    few = slots * rank * max(BLOCK_N, padded(parts, 1)) <= MOST_VALUES
    return bool(listed.each) and block_of(listed, rank) == 1 and few


def expand_summed(
    made: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, listed: PlaceList, sum_of: Summands,
    after: Unscaled | None = None, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    """made [T, top_k, width], low of `shrink` -> [T, width]: `residual`, in place, or new; see `sums_at_once`.

    after: takes the prescaled rows, for a norm of the result. next_low: takes A x of the layer behind that norm.
    """
    launch = launch_expand_summed if made.is_cuda else expand_summed_reference
    return launch(made, low, matrices, shape, listed, sum_of, after, next_low)


def launch_expand_summed(
    made: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, listed: PlaceList, sum_of: Summands,
    after: Unscaled | None = None, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    """Launches the Triton kernel."""
    (rows, top_k, width), parts, rank = made.shape, len(low), low.shape[3]
    weights, shared, gate, residual, count = sum_of
    out = made.new_empty(rows, width) if residual is None else residual
    assert listed.settled, "shrink has read the list"
    assert listed.each == top_k, "each pair is a tile"
    assert made.is_contiguous(), "made is contiguous"
    assert out.is_contiguous(), "the residual stream is contiguous"
    assert width == shape.width, f"made has {width} columns"
    assert next_low is None or after is not None, "A x of prescaled rows"
    if rows:
        expand_summed_kernel[(rows, triton.cdiv(width, BLOCK_N))](
            out, out if after is None else after.rows, low if after is None else after.squares,
            low if next_low is None else next_low.low, made, low, matrices.values, matrices.words, listed.order,
            listed.tiles, weights, shared, gate, residual, low if after is None else after.gain, count, rows, parts,
            shape.in_features, width, shape.experts, matrices.words.shape[1], shape.number, matrices.values.shape[1],
            0 if next_low is None else next_low.shape.number, TOP_K=top_k, SLOTS=padded(top_k, 1), RANK=rank,
            BLOCK_N=BLOCK_N, LOWS=lows_of(parts, 1, rank), AFTER=after is not None, num_warps=8,
            **next_constants(next_low), **launch_options(),
        )  # fmt: skip
    return out


def expand_summed_reference(
    made: Tensor, low: Tensor, matrices: PlaceMatrices, shape: SiteShape, listed: PlaceList, sum_of: Summands,
    after: Unscaled | None = None, next_low: NextLow | None = None,
) -> Tensor:  # fmt: skip
    made = made.clone()
    expand_reference(made.flatten(0, 1), low, matrices, shape, listed, torch.empty(0))
    weights, shared, gate, residual, count = sum_of
    out = combine_reference(made, weights, shared, gate, residual, after, count)
    if after is not None:
        next_low_reference(next_low, after.rows, matrices)
    return out
