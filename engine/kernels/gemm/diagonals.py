"""Diagonals: one row of x times two weight rows on matrix units, without moving operands between threads.

In mma.m16n8, rows 0 to 7 of the first operand are the columns of one weight row that eight groups of four threads hold,
rows 8 to 15 the same columns of another weight row, and column n of the second operand is group n's part of x. The
wanted sums are the two diagonals; the other sums are discarded, which is still faster than a multiply-add for each
code. Nothing goes through shared memory or changes lanes. A thread may hold any columns, but the same of both rows and
of x.
Users: gemm/float8_row, moe/pairs, moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.target import tl, triton

# Selects the sums on the diagonals: of the sums $8 to $11 the first two belong to one weight row.
DIAGONAL = tl.constexpr(
    "{ .reg .u32 group, first; .reg .pred even, odd; mov.u32 group, %laneid; and.b32 first, group, 3;"
    " shl.b32 first, first, 1; shr.u32 group, group, 2; setp.eq.u32 even, group, first; add.u32 first, first, 1;"
    " setp.eq.u32 odd, group, first; selp.f32 $0, $8, 0f00000000, even; selp.f32 $1, $9, 0f00000000, odd;"
    " mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; selp.f32 $4, $10, 0f00000000, even;"
    " selp.f32 $5, $11, 0f00000000, odd; mov.f32 $6, 0f00000000; mov.f32 $7, 0f00000000; }"
)


@triton.jit
def on_diagonals(sums):
    """Results of `mma`, four per thread -> the results of each of the two weight rows, with zeros off the diagonals;
    all [lanes, 4]."""
    return tl.inline_asm_elementwise(
        DIAGONAL, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f", [sums], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
    )
