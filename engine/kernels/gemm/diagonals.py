"""Diagonals: one row of x by two weight rows through matrix units, each thread's share of the operands where it lies.

Of mma.m16n8 the rows 0 to 7 of the first operand are what eight groups of four threads hold of one weight row, the rows
8 to 15 what they hold of the other, and column n of the second operand is what group n holds of x. The sums that are
wanted are the two diagonals; the rest is thrown away, and yet a multiply-add for each code took longer. Nothing passes
shared memory or changes lanes. A thread may hold any columns, the same of both rows and of x.
Users: gemm/float8_row, moe/pairs, moe/pairs_float8.
"""

from __future__ import annotations

from engine.kernels.target import tl, triton

# Where a thread's group is on the diagonal: of the sums $8 to $11 the first two are of one weight row.
DIAGONAL = tl.constexpr(
    "{ .reg .u32 group, first; .reg .pred even, odd; mov.u32 group, %laneid; and.b32 first, group, 3;"
    " shl.b32 first, first, 1; shr.u32 group, group, 2; setp.eq.u32 even, group, first; add.u32 first, first, 1;"
    " setp.eq.u32 odd, group, first; selp.f32 $0, $8, 0f00000000, even; selp.f32 $1, $9, 0f00000000, odd;"
    " mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; selp.f32 $4, $10, 0f00000000, even;"
    " selp.f32 $5, $11, 0f00000000, odd; mov.f32 $6, 0f00000000; mov.f32 $7, 0f00000000; }"
)


@triton.jit
def on_diagonals(sums):
    """Results of `mma`, a thread's four side by side -> those of one weight row and of the other, zeros off the
    diagonals: all [lanes, 4]."""
    return tl.inline_asm_elementwise(
        DIAGONAL, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f", [sums], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
    )
