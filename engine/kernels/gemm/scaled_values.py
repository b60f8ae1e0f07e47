"""Products of two or more rows with 4-bit codes; scales multiply the values: y = x W^T (+ bias) (+ residual).

    w[n, k] = round((value(code[n, k]) - zero[n, k // group]) * scale[n, k // group])    (row_scale[n] scales sums)

A value is rounded once to bfloat16, as in gemm/widen_weight. So a tile has one accumulator for the whole depth, and the
matrix units read an iteration's values from registers while other units still compute the following values:

    units    | words, scales | values 0 | values 1 .. |        | words, scales | ...
    matrix   |                          | product 0 | product 1 .. | wait      | ...

The wait at the end of an iteration is explicit. Without it the compiler would let products run into the next iteration,
and the assembler, which cannot track them around a loop, would then wait for every single product. First come tiles
that have a program each. The remaining tiles, with their iterations, form one sequence that is divided into equal runs,
one per program (gemm/value_cuts). A program that ends inside a tile writes partial sums in float32; the last of the
tile's programs adds them up in order. Blocks of x and of words are loaded by tensor descriptors. The kernel is only for
NVIDIA's sm_90; gemm/groups computes the products that `takes` refuses.
Users: gemm/dispatch_codes.
"""

# ruff: noqa: PT018 (a launcher checks in few lines)
from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.activation import Activation, activate, activate_reference
from engine.kernels.gemm.codes import FOUR_BITS
from engine.kernels.gemm.descriptors import describe, is_aligned
from engine.kernels.gemm.groups import KINDS, Packed
from engine.kernels.gemm.split_k import MAX_TILES, arrivals
from engine.kernels.gemm.value_cuts import Cut
from engine.kernels.gemm.widen import values_less, values_of
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.room import whole_tiles
from engine.kernels.target import target, tl, triton

RUN = 16  # columns between a word's codes; groups of columns with one scale are multiples of it
LEAST_ROWS = 2


@triton.jit
def in_halves(table, at):
    """Loads from a table; float32 as two 16-bit halves, because whole loads would take shared memory that blocks
    need."""
    if table.dtype.element_ty == tl.float32:
        halves = table.to(tl.pointer_type(tl.uint16))
        low = tl.load(halves + 2 * at).to(tl.uint32)
        high = tl.load(halves + 2 * at + 1).to(tl.uint32)
        found = (low | (high << 16)).to(tl.float32, bitcast=True)
    else:
        found = tl.load(table + at)
    return found


@triton.jit
def of_rows(table, first, apart, height, groups, group, BLOCK_N: tl.constexpr):
    """Column `group` of a table [height, groups] at a tile's rows: [BLOCK_N, 1].

    64 rows from `first` on; with 128 rows the second 64 are `apart` rows further, with 256 the second 128. Each load
    has fewer rows than the program has threads, so each thread loads its own operand, without shared memory. Rows
    beyond the table read its last row: loads without a mask save an instruction each.
    """
    HALF: tl.constexpr = 128 if BLOCK_N == 256 else 64
    row = first + tl.arange(0, HALF)
    found = in_halves(table, tl.minimum(row, height - 1).to(tl.int64) * groups + group)
    if BLOCK_N > HALF:
        others = in_halves(table, tl.minimum(row + apart, height - 1).to(tl.int64) * groups + group)
        found = tl.join(found, others).permute((1, 0)).reshape((BLOCK_N,))
    return found[:, None]


@triton.jit
def times(values, scale, PAIRS: tl.constexpr):
    """values [n, columns] times scale [n, 1], rounded to values' dtype; a longer scale is the sum of two bfloat16."""
    if PAIRS:
        high = scale.to(tl.bfloat16)
        if scale.dtype != tl.bfloat16:
            low = (scale.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
            values = tl.inline_asm_elementwise(
                "{ .reg .b32 low; mul.rn.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }", "=r,r,r,r",
                [values, high, low], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            values = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, high], dtype=tl.bfloat16, is_pure=True, pack=2
            )
    else:
        values = (values.to(tl.float32) * scale.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def wait_for_products():
    """Waits until the matrix units have finished all products; see the module's docstring."""
    tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def of_place(
    scales, zeros, first_n, apart, height, first, groups, PLACE: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales and zeros [BLOCK_N, 1], if any, of code number PLACE in an iteration from column `first` on."""
    at: tl.constexpr = 0 if GROUP % 64 == 0 else 16 * PLACE
    group = tl.minimum((first + at) // GROUP, groups - 1)
    scale, zero = 0, 0
    if SCALES:
        scale = of_rows(scales, first_n, apart, height, groups, group, BLOCK_N)
    if ZEROS:
        zero = of_rows(zeros, first_n, apart, height, groups, group, BLOCK_N)
    return scale, zero


@triton.jit
def scaled_of(
    tile, scale, zero, dtype: tl.constexpr, PLACE: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The scaled values of code number PLACE of a tile of words [BLOCK_N, words]."""
    if ZEROS:
        values = values_less(tile, zero, dtype, KIND, PLACE, PAIRS)
    else:
        values = values_of(tile, dtype, KIND, PLACE, PAIRS)
    if SCALES:
        values = times(values, scale, PAIRS)
    return values


@triton.jit
def sums_of(
    x, words, scales, zeros, first_m, first_n, apart, height, groups, start, end, KIND: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums of iterations start .. end - 1 of a tile: float32 [BLOCK_N, BLOCK_M]."""
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(start, end):
        first = turn * BLOCK_K
        # Loaded before the wait for the blocks.
        s0, z0 = of_place(scales, zeros, first_n, apart, height, first, groups, 0, GROUP, SCALES, ZEROS, BLOCK_N)
        s1, z1 = of_place(scales, zeros, first_n, apart, height, first, groups, 1, GROUP, SCALES, ZEROS, BLOCK_N)
        s2, z2 = of_place(scales, zeros, first_n, apart, height, first, groups, 2, GROUP, SCALES, ZEROS, BLOCK_N)
        s3, z3 = of_place(scales, zeros, first_n, apart, height, first, groups, 3, GROUP, SCALES, ZEROS, BLOCK_N)
        if GATED:
            block = words.load([0, first_n, first // 4]).reshape((BLOCK_N, BLOCK_K // 4))
        else:
            block = words.load([first_n, first // 4])
        tokens = x.load([first_m, first])
        dtype: tl.constexpr = tokens.dtype
        v0 = scaled_of(block, s0, z0, dtype, 0, KIND, SCALES, ZEROS, PAIRS)
        v1 = scaled_of(block, s1, z1, dtype, 1, KIND, SCALES, ZEROS, PAIRS)
        v2 = scaled_of(block, s2, z2, dtype, 2, KIND, SCALES, ZEROS, PAIRS)
        v3 = scaled_of(block, s3, z3, dtype, 3, KIND, SCALES, ZEROS, PAIRS)
        # No data moves between threads: only the names of registers change.
        each = tl.join(tl.join(v0, v1), tl.join(v2, v3)).reshape((BLOCK_N, BLOCK_K // 64, 16, 2, 2))
        values = each.permute((0, 1, 4, 3, 2)).reshape((BLOCK_N, BLOCK_K))
        sums = tl.dot(values, tokens.T, sums, input_precision="ieee")
        if PAIRS:
            wait_for_products()
    return sums


@triton.jit(do_not_specialize=["rows", "whole", "run"])
def scaled_values_kernel(
    out,  # [rows, width]
    partial,  # [programs after `whole`, 2, BLOCK_N, BLOCK_M] float32: sums of a program's first and last tile
    arrived,  # [MAX_TILES] int32, from tile `whole` on; zero before and after
    x,  # [rows, depth] in blocks [BLOCK_M, BLOCK_K]
    words,  # gemm/widen's [width, line] in blocks [BLOCK_N, BLOCK_K / 4]; GATED: [2, width, line], two halves a block
    scales,  # [width, groups] when SCALES; GATED: gate's rows, then up's, as of zeros, row_scales and bias
    zeros,  # [width, groups] int8 when ZEROS
    row_scales,  # [width] float32 when ROW_SCALES
    bias,  # [width] when BIAS
    residual,  # [rows, width] when RESIDUAL; may be out
    rows,
    width,
    depth,
    groups,
    whole,  # number of programs with one tile each
    run,  # iterations of each further program
    KIND: tl.constexpr,  # a kind of gemm/widen
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,  # a tile has as many rows of gate as of up
    ACT: tl.constexpr,  # an Activation when GATED
    PAIRS: tl.constexpr,  # two values at a time, with explicit waits
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes a run of iterations per program; neighbouring tiles read the same weights."""
    program, m_tiles = tl.program_id(0), tl.cdiv(rows, BLOCK_M)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the result
    tiles, turns = m_tiles * tl.cdiv(width, COLUMNS), tl.cdiv(depth, BLOCK_K)
    height, apart = (2 * width, width) if GATED else (width, 64)  # rows of the weight, and between a tile's halves
    start, end = program * turns, (program + 1) * turns
    if program >= whole:
        start = whole * turns + (program - whole) * run
        end = tl.minimum(start + run, tiles * turns)
    grid_wait(OVERLAP)
    for tile in range(start // turns, tl.cdiv(end, turns)):
        first_n, first_m = tile // m_tiles * COLUMNS, tile % m_tiles * BLOCK_M
        sums = sums_of(
            x, words, scales, zeros, first_m, first_n, apart, height, groups, tl.maximum(start - tile * turns, 0),
            tl.minimum(end - tile * turns, turns), KIND, GROUP, SCALES, ZEROS, GATED, PAIRS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        last = True
        # The first and the last program after `whole` with iterations of this tile.
        before = (tile - whole) * turns
        first_part = before // run
        parts = (before + turns - 1) // run - first_part + 1
        if (program >= whole) & (parts > 1):
            size: tl.constexpr = BLOCK_N * BLOCK_M
            place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            is_last = (tile != start // turns).to(tl.int64)
            tl.store(partial + ((program - whole) * 2 + is_last) * size + place, sums)
            tl.debug_barrier()  # every thread's part is written before the arrival is counted
            last = tl.atomic_add(arrived + tile - whole, 1, sem="acq_rel") == parts - 1
            if last:
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for part in range(first_part, first_part + parts):
                    is_last = (tile - whole != part * run // turns).to(tl.int64)
                    sums += tl.load(partial + (part * 2 + is_last) * size + place, cache_modifier=".cg")
                tl.store(arrived + tile - whole, 0)
        if last:
            if ROW_SCALES:
                sums *= of_rows(row_scales, first_n, apart, height, 1, 0, BLOCK_N)
            if BIAS:
                sums += of_rows(bias, first_n, apart, height, 1, 0, BLOCK_N).to(tl.float32)
            y = sums
            if GATED:
                gate, up = sums.reshape((2, COLUMNS, BLOCK_M)).permute((1, 2, 0)).split()
                y = activate(gate, up, ACT)
            column, m = first_n + tl.arange(0, COLUMNS), first_m + tl.arange(0, BLOCK_M)
            inside = (column < width)[:, None] & (m < rows)[None, :]
            target = m.to(tl.int64)[None, :] * width + column[:, None]
            if RESIDUAL:
                y += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + target, y.to(out.dtype.element_ty), mask=inside)


def takes(x: Tensor, weight: Packed) -> bool:
    """Whether the kernel takes rows x [M, K] times this weight."""
    return (
        len(x) >= LEAST_ROWS
        and x.dtype is torch.bfloat16
        and target().arch == "sm_90"
        and weight.words
        and weight.kind in FOUR_BITS
        and weight.group % RUN == 0
        and (weight.zeros is None or weight.zeros.dtype is torch.int8)
        and is_aligned(x)
        and is_aligned(weight.codes)
    )


def scaled_values_product(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: Activation | None,
    cut: Cut,
) -> None:  # fmt: skip
    """x [M, K] with contiguous rows times the weight [N, K] into out [M, N]; bias [N]; residual [M, N], may be out.

    With an activation the weight is [2N, K], gate's rows first, the bias [2N], and there is no residual. x is bfloat16.
    Can be captured after `arrivals` was called on the device.
    """
    if x.is_cuda:
        launch_scaled_values(x, weight, bias, residual, out, activation, cut)
    else:
        scaled_values_reference(x, weight, bias, residual, out, activation, cut)


def launch_scaled_values(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: Activation | None,
    cut: Cut,
) -> None:  # fmt: skip
    """The Triton kernel; arguments as `scaled_values_product`."""
    (rows, depth), width, (_, line) = x.shape, out.shape[1], weight.codes.shape
    sides, columns = (1, cut.block_n) if activation is None else (2, cut.block_n // 2)
    assert x.stride(1) == 1 and out.is_contiguous() and out.shape == (rows, width) and out.dtype == x.dtype
    assert depth == weight.depth and len(weight.codes) == sides * width, f"{tuple(x.shape)} times {weight.codes.shape}"
    assert activation is None or residual is None
    tiles, turns = triton.cdiv(rows, cut.block_m) * triton.cdiv(width, columns), triton.cdiv(depth, cut.block_k)
    whole = min(cut.whole, tiles)
    others = triton.cdiv((tiles - whole) * turns, cut.turns)
    assert tiles - whole <= MAX_TILES
    partial = torch.empty(others * 2 * cut.block_n * cut.block_m, dtype=torch.float32, device=x.device)
    words = describe(weight.codes, cut.block_n, cut.block_k // 4)
    if activation is not None:
        words = describe(weight.codes.view(2, width, line), 2, columns, cut.block_k // 4)
    scaled_values_kernel[(whole + others,)](
        out, partial, arrivals(x.device), describe(whole_tiles(x, cut.block_m), cut.block_m, cut.block_k), words,
        out if weight.scales is None else weight.scales, out if weight.zeros is None else weight.zeros,
        out if weight.row_scales is None else weight.row_scales, out if bias is None else bias,
        out if residual is None else residual, rows, width, depth, -(-depth // weight.group), whole,
        cut.turns, KIND=KINDS[weight.kind], GROUP=weight.group, SCALES=weight.scales is not None,
        ZEROS=weight.zeros is not None, ROW_SCALES=weight.row_scales is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, GATED=activation is not None, ACT=int(activation or 0),
        PAIRS=x.is_cuda, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
        num_warps=cut.warps, num_stages=cut.stages, **launch_options(),
    )  # fmt: skip


def scaled_values_reference(
    x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor | None, out: Tensor, activation: Activation | None,
    cut: Cut,
) -> None:  # fmt: skip
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.nn.functional.linear(x.to(wide), weight.dense().to(wide), None if bias is None else bias.to(wide))
    if activation is not None:
        y = activate_reference(y, activation)
    out.copy_(y if residual is None else y + residual)
