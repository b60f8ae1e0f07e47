"""Products of sorted pairs in FP8 with experts in FP8, as the checkpoint quantises both.

    rows     y[pair, n] = s_x[token] s_w[n] sum_k x[token, k] w[n, k]
    blocks   y[pair, n] = sum_b s_x[b, token] s_w[n, b] sum_(k in b) x[token, k] w[n, k]       b: 128 columns

The matrix units add 128 columns and these sums are added in float32, as in gemm/float8. A program multiplies a tile of
an expert's pairs by two blocks of the expert's rows: gate and up, or two neighbouring blocks. If the next product's
inputs have a scale per 128 columns, a block has 128 rows, and the program quantises its result, so floats are never
written. If 128 rows share their scales, as in blocks of 128 by 128, one scale multiplies a block's sums.
In a gated product the last few pairs of an expert have a smaller tile, because every tile is computed completely: with
80 pairs the second tile of 64 would have only 16.
The scales of the next columns are loaded before the wait for this iteration's products. Users: moe/dispatch_float8.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate
from engine.kernels.gemm.codes import Codes, Inputs, quantised_e4m3
from engine.kernels.gemm.descriptors import describe, has_descriptors, is_aligned
from engine.kernels.gemm.float8_library import blocks_of
from engine.kernels.gemm.groups import Packed, packed
from engine.kernels.gemm.quantise_floats import CodedRows, coded, empty_coded, scale_of
from engine.kernels.gemm.widen import E4M3, widened
from engine.kernels.moe.grouped import Tile, grouped_reference, pairs_of_tile, tile_of_experts
from engine.kernels.moe.sort import Pairs
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.target import HAS_TRITON, Target, target, tl, triton

BLOCK = 128  # columns that the units add, columns of a block of scales, and columns of inputs per scale
LEAST = 16  # pairs of the smallest tile
LEAST_LEFT = 64  # least pairs of a tile for the pairs to be the left operand, of which the units need 64 rows
FLOATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32} if HAS_TRITON else {}


@triton.jit
def scales_of(scales, row, group, height, WHOLE: tl.constexpr):
    """The scales of weight rows `row` for an iteration: [BLOCK_N], or one for all."""
    line = row // 128 if WHOLE else row
    return tl.load(scales + line.to(tl.int64) * height + group).to(tl.float32)


@triton.jit
def of_tokens(vector, LEFT: tl.constexpr):
    """Expands a vector of tokens to a tile."""
    return tl.expand_dims(vector, 1 if LEFT else 0)


@triton.jit
def of_rows(vector, LEFT: tl.constexpr):
    """Expands a vector of weight rows to a tile."""
    return tl.expand_dims(vector, 0 if LEFT else 1)


@triton.jit
def times(product, scale, of_x, WHOLE: tl.constexpr, LEFT: tl.constexpr):
    """A tile times the scales of its rows and tokens."""
    if WHOLE:
        product *= of_tokens(scale * of_x, LEFT)
    else:
        product *= of_rows(scale, LEFT)
        product *= of_tokens(of_x, LEFT)
    return product


@triton.jit
def finished(sums, scales, bias, weights, row, x_at, pair, m_in, BLOCKED: tl.constexpr, LEFT: tl.constexpr):
    """A block's sums times the scales of rows and tokens (unless BLOCKED), times weights, plus the bias."""
    if not BLOCKED:
        sums *= of_rows(tl.load(scales + row), LEFT) * of_tokens(tl.load(x_at), LEFT)
    if weights is not None:
        sums *= of_tokens(tl.load(weights + pair, mask=m_in, other=0.0), LEFT)
    if bias is not None:
        sums += of_rows(tl.load(bias + row), LEFT)
    return sums


@triton.jit
def block_codes(values, POWERS: tl.constexpr, ROUNDS: tl.constexpr, LEFT: tl.constexpr):
    """The codes of a block, and the scale of each token."""
    scale = scale_of(tl.max(tl.abs(values), 1 if LEFT else 0), POWERS)
    return coded(values, tl.broadcast_to(of_tokens(scale, LEFT), values.shape), ROUNDS), scale


@triton.jit
def turn_of(lines, line, depth, start, EVEN: tl.constexpr):
    """Loads 128 columns of these lines, zeros beyond the last column: [lines, 128]."""
    k = start + tl.arange(0, 128)
    at = lines + (line.to(tl.int64)[:, None] * depth + k[None, :])
    if EVEN:  # lines are 16-byte aligned; without this hint Triton 3.6 would not pipeline the loads
        found = tl.load(tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 128)))
    else:
        found = tl.load(at, mask=(k < depth)[None, :], other=0.0)
    return found


@triton.jit
def met(values, tokens, NATIVE: tl.constexpr, KIND: tl.constexpr, LEFT: tl.constexpr):
    """Codes [BLOCK_N, 128] times codes [BLOCK_M, 128] -> float32; without e4m3 units in float16, which is exact."""
    if NATIVE:
        one, other = values.to(tl.float8e4nv, bitcast=True), tokens.to(tl.float8e4nv, bitcast=True)
    else:
        one = widened(values, KIND).to(tl.float16)
        other = tl.where((tokens & 0x7F) == 0x7F, float("nan"), widened(tokens, KIND)).to(tl.float16)
    if LEFT:
        product = tl.dot(other, one.T)
    else:
        product = tl.dot(one, other.T)
    return product


@triton.jit
def multiply_tile(
    out, out_scales, x, x_scales, codes, scales, bias, weights, order, expert, first, end, tokens, pairs, width, depth,
    height, TOP_K: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BLOCKED: tl.constexpr, WHOLE: tl.constexpr,
    THEN: tl.constexpr, FLOAT: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    ROUNDS: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Multiplies an expert's pairs from `first` on, at most BLOCK_M, by two blocks of the expert's rows."""
    SIDES: tl.constexpr = 2 if GATED else 1
    TURN: tl.constexpr = 128
    HIGH: tl.constexpr = BLOCK_M if LEFT else BLOCK_N
    m_in, pair, source, target = pairs_of_tile(order, first, end, TOP_K, True, GATED, BLOCK_M)
    source = tl.minimum(source, tokens - 1)  # reads beyond the last pair or row are clamped, not written
    first_n = tl.program_id(0) * (BLOCK_N if GATED else 2 * BLOCK_N)
    next_n = first_n if GATED else first_n + BLOCK_N
    column, behind = first_n + tl.arange(0, BLOCK_N), next_n + tl.arange(0, BLOCK_N)
    line, other_line = expert * SIDES * width, (expert * SIDES + SIDES - 1) * width  # rows of all experts
    row, other_row = line + tl.minimum(column, width - 1), other_line + tl.minimum(behind, width - 1)
    at_row, at_other = row, other_row
    if WHOLE:
        at_row = line + first_n
        at_other = other_line + tl.minimum(next_n, width - 1)
    last = tl.cdiv(depth, TURN) - 1
    x_at = x_scales + source
    sums = tl.zeros([HIGH, BLOCK_M * BLOCK_N // HIGH], tl.float32)
    others = tl.zeros([HIGH, BLOCK_M * BLOCK_N // HIGH], tl.float32)
    next_x, next_row, next_other = 0.0, 0.0, 0.0
    if BLOCKED:
        next_x, next_row = tl.load(x_at), scales_of(scales, at_row, 0, height, WHOLE)
        next_other = scales_of(scales, at_other, 0, height, WHOLE)
    for group in range(last + 1):
        start, following = group * TURN, tl.minimum(group + 1, last)
        of_x, of_row, of_other = next_x, next_row, next_other
        if BLOCKED:
            next_x = tl.load(x_at + following.to(tl.int64) * tokens)
            next_row = scales_of(scales, at_row, following, height, WHOLE)
            next_other = scales_of(scales, at_other, following, height, WHOLE)
        if GATED or not DESCRIBED:
            rows = turn_of(x, source, depth, start, EVEN)
        else:
            rows = x.load([first, start])
        if DESCRIBED:
            block = codes.load([expert * SIDES, first_n, start]).reshape((BLOCK_N, TURN))
        else:
            block = turn_of(codes, row, depth, start, EVEN)
        product = met(block, rows, NATIVE, KIND, LEFT)
        sums += times(product, of_row, of_x, WHOLE, LEFT) if BLOCKED else product
        if DESCRIBED:
            block = codes.load([expert * SIDES + SIDES - 1, next_n, start]).reshape((BLOCK_N, TURN))
        else:
            block = turn_of(codes, other_row, depth, start, EVEN)
        product = met(block, rows, NATIVE, KIND, LEFT)
        others += times(product, of_other, of_x, WHOLE, LEFT) if BLOCKED else product
    sums = finished(sums, scales, bias, weights, row, x_at, pair, m_in, BLOCKED, LEFT)
    others = finished(others, scales, bias, weights, other_row, x_at, pair, m_in, BLOCKED, LEFT)
    if GATED:
        sums = activate(sums, others, ACT)
    n_in, pairs_in = of_rows(column < width, LEFT), of_tokens(m_in, LEFT)
    at = out + of_tokens(target.to(tl.int64) * width, LEFT) + of_rows(column, LEFT)
    if THEN:
        kept = tl.where(n_in, sums.to(FLOAT).to(tl.float32), 0.0)
        made, scale = block_codes(kept, THEN == 2, ROUNDS, LEFT)
        tl.store(out_scales + tl.program_id(0).to(tl.int64) * pairs + target, scale, mask=m_in)
        tl.store(at, made, mask=n_in & pairs_in)
    else:
        tl.store(at, sums.to(out.dtype.element_ty), mask=n_in & pairs_in)
    if not GATED:
        n_in = of_rows(behind < width, LEFT)
        tl.store(at + BLOCK_N, others.to(out.dtype.element_ty), mask=n_in & pairs_in)


@triton.jit(do_not_specialize=["tokens", "pairs"])
def float8_experts_kernel(
    out,  # [pairs, width]: GATED: in sorted order, else by pair; codes when THEN
    out_scales,  # [width / 128, pairs] float32 when THEN
    x,  # codes; GATED: [tokens, depth]; else [pairs, depth] in sorted order, DESCRIBED in blocks [BLOCK_M, 128]
    x_scales,  # [groups, tokens] float32
    codes,  # [experts, width, depth], GATED [2 experts, ..]; DESCRIBED in blocks [1, BLOCK_N, 128]
    scales,  # [rows of all experts, height]; WHOLE: [.. / 128, height]; scales per row: [rows of all experts]
    bias,  # [rows of all experts] float32, or None
    weights,  # [pairs] float32 by pair, factors of the sums of gate and of up; or None
    order,  # [pairs] int32
    ends,  # [experts] int32
    tokens,  # columns of x_scales: the tokens with GATED, else the pairs
    pairs,
    experts,
    width,
    depth,
    height,  # length of a line of scales
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACT: tl.constexpr,  # an Activation when GATED
    EXPERTS: tl.constexpr,  # power of two >= experts
    BLOCKED: tl.constexpr,  # scales per 128 columns
    WHOLE: tl.constexpr,  # scales per 128 rows and 128 columns
    THEN: tl.constexpr,  # result: 0: floats; 1: codes for the next product; 2: codes with power-of-two scales
    FLOAT: tl.constexpr,  # dtype to which results are rounded before quantisation
    DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr,  # depth is a multiple of 128
    NATIVE: tl.constexpr,  # the matrix units take e4m3
    ROUNDS: tl.constexpr,  # an instruction rounds to e4m3
    KIND: tl.constexpr,  # e4m3's number in gemm/widen
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,  # a tile is [BLOCK_M, BLOCK_N]; else [BLOCK_N, BLOCK_M]
    LEAST: tl.constexpr,  # GATED: pairs of an expert's smaller last tile; 0: all tiles have BLOCK_M
    OVERLAP: tl.constexpr,
):
    """Computes one tile of an expert's pairs and rows per program."""
    grid_wait(OVERLAP)
    expert, first, end = tile_of_experts(ends, tl.program_id(1), experts, EXPERTS, BLOCK_M)
    if expert < experts:
        if LEAST and end - first <= LEAST:
            multiply_tile(
                out, out_scales, x, x_scales, codes, scales, bias, weights, order, expert, first, end, tokens,
                pairs, width, depth, height, TOP_K, GATED, ACT, BLOCKED, WHOLE, THEN, FLOAT, DESCRIBED, EVEN, NATIVE,
                ROUNDS, KIND, LEAST, BLOCK_N, False,
            )  # fmt: skip
        else:
            multiply_tile(
                out, out_scales, x, x_scales, codes, scales, bias, weights, order, expert, first, end, tokens, pairs,
                width, depth, height, TOP_K, GATED, ACT, BLOCKED, WHOLE, THEN, FLOAT, DESCRIBED, EVEN, NATIVE, ROUNDS,
                KIND, BLOCK_M, BLOCK_N, LEFT,
            )  # fmt: skip


def float8_experts_product(
    x: CodedRows, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, dtype: torch.dtype, weights: Tensor | None = None, then: Inputs | None = None,
) -> Tensor | CodedRows:  # fmt: skip
    """As moe/grouped's product of sorted pairs, codes times codes [E * N, K], or with an activation [E * 2N, K].

    The weight and x are E4M3 with a scale per row or per 128 columns of a row. The result has `dtype`; after an
    activation, if `codes_next(then)` holds, the result is the codes that the next product reads. weights: float32
    [T, top_k], as in moe/grouped.
    """
    launch = launch_float8_experts if x.codes.is_cuda else float8_experts_reference
    return launch(x, weight, experts, bias, pairs, activation, tile, dtype, weights, then)


def pack_float8_experts(codes: Codes, width: int) -> Packed:
    """Packs codes; stores scales by blocks if 128 rows share them and `width` rows of an expert are whole blocks."""
    weight = packed(codes, words=False)
    blocks = None if weight.scales is None or width % BLOCK else blocks_of(weight.scales)
    return weight if blocks is None else replace(weight, scales=blocks, tall=BLOCK)


def codes_next(inputs: Inputs | None) -> bool:
    """Whether a program can quantise in this way, from only its own 128 columns."""
    return inputs is not None and inputs.group == BLOCK and inputs.scale is None


def launch_float8_experts(
    x: CodedRows, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, dtype: torch.dtype, weights: Tensor | None = None, then: Inputs | None = None,
    native: bool | None = None,
) -> Tensor | CodedRows:  # fmt: skip
    """The Triton kernel; arguments as `float8_experts_product`. Can be captured.

    native: whether the matrix units support e4m3; None: the device's value.
    """
    assert pairs.order is not None and pairs.ends is not None and tile.block_k == BLOCK
    gated, depth = activation is not None, weight.depth
    native = target().multiplies_float8 if native is None else native
    sides, blocked = 2 if gated else 1, weight.scales is not None
    width, tokens = len(weight.codes) // experts // sides, len(x.codes)
    scales = weight.row_scales if weight.scales is None else weight.scales
    whole = weight.tall == BLOCK
    assert weight.tall == 1 or (whole and width % BLOCK == 0 and BLOCK % tile.block_n == 0)
    assert scales is not None and (blocked == (weight.row_scales is None)) and x.scales.is_contiguous()
    assert x.codes.is_contiguous() and x.codes.shape[1] == depth and not weight.words
    assert x.scales.shape == (-(-depth // BLOCK) if blocked else 1, tokens)
    assert weights is None or (gated and weights.is_contiguous())
    assert gated or not tile.least  # else x is in blocks of BLOCK_M
    makes = gated and codes_next(then)
    assert not makes or tile.block_n == BLOCK
    codes = weight.codes.view(experts * sides, width, depth)
    made = CodedRows(x.codes.new_empty(pairs.count, width, dtype=dtype), x.scales)
    if makes and then is not None:
        made = empty_coded(pairs.count, width, then, x.codes.device)
    described = native and is_aligned(x.codes) and is_aligned(weight.codes)
    described = described and (has_descriptors() or not x.codes.is_cuda)
    rows, values = x.codes, codes
    if native:
        rows, values = rows.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    if described:
        values = describe(values, 1, tile.block_n, BLOCK)
        rows = rows if gated else describe(rows, tile.block_m, BLOCK)
    tiles = triton.cdiv(pairs.count, tile.block_m) + min(experts, pairs.count)  # an expert's last tile may be partial
    if pairs.count:
        columns = tile.block_n if gated else 2 * tile.block_n
        float8_experts_kernel[(triton.cdiv(width, columns), tiles)](
            made.codes, made.scales, rows, x.scales, values, scales, bias, weights, pairs.order, pairs.ends,
            tokens, pairs.count, experts, width, depth, scales.shape[1] if blocked else 1, TOP_K=pairs.top_k,
            GATED=gated, ACT=int(activation or 0), EXPERTS=triton.next_power_of_2(experts), BLOCKED=blocked,
            WHOLE=whole, THEN=0 if not makes or then is None else 2 if then.powers else 1, FLOAT=FLOATS[dtype],
            DESCRIBED=described, EVEN=depth % BLOCK == 0, NATIVE=native, ROUNDS=target().widens_fp8, KIND=E4M3,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, LEFT=tile.block_m >= LEAST_LEFT, LEAST=tile.least,
            num_warps=tile.warps, num_stages=tile.stages, **launch_options(),
        )  # fmt: skip
    return made if makes else made.codes


def float8_experts_reference(
    x: CodedRows, weight: Packed, experts: int, bias: Tensor | None, pairs: Pairs, activation: Activation | None,
    tile: Tile, dtype: torch.dtype, weights: Tensor | None = None, then: Inputs | None = None,
) -> Tensor | CodedRows:  # fmt: skip
    values = weight.dense().view(experts, -1, weight.depth)
    y = grouped_reference(x.dense(), values, bias, pairs, activation, weights).to(dtype)
    if activation is None or not codes_next(then):
        return y
    assert then is not None
    return CodedRows(*quantised_e4m3(y, then))


def float8_tile(device: Target, each: float, gated: bool) -> Tile:
    """The tile for `each` pairs per expert on average: `block_n` rows of gate and of up, or twice as many.

    Loads have three stages if a unit's shared memory is large enough, else two.
    """
    block_m = 16 if each <= 16 else 32 if each <= 32 else 64
    block_n, stages = BLOCK if gated else BLOCK // 2, 3
    least = LEAST if gated and block_m > LEAST else 0
    while stages > 2 and stages * (block_m + 2 * block_n) * BLOCK >= device.shared_memory:
        stages -= 1
    return Tile(block_m, block_n, BLOCK, stages, 8 if gated and block_m > 32 else 4, least=least)
