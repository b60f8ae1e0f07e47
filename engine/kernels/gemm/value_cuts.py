"""How gemm/scaled_values divides a product into programs.

With few tiles most units would wait; with one tile more than units, all units but one would wait for it. So the tiles
after the last full wave are shared: several programs compute the sums of each of these tiles.

    slots   | tile 0 | tile 1 | .. | tile 263 |     264 tiles have a program each, and then
            | a | a | b | b | c | c | ..      |     each further tile has two

Users: gemm/dispatch_codes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.kernels.gemm.groups import Packed
from engine.kernels.room import MAX_BLOCK
from engine.kernels.target import target, triton

WARPS = 4
WIDE = 1.4  # for more than 64 rows, tiles of 128 weight rows are used if there are this many per unit
LEAST_TURNS = 4  # least iterations of a program that shares a tile
SHARED = 64 * 128  # largest tile, in sums, for which one program per unit has its own tile and the others share


class Form(NamedTuple):
    """A tile's weight rows, and how many stages and programs a unit can hold."""

    block_n: int
    stages: int  # stages of iterations of 128 columns
    programs: int  # programs per unit, limited by shared memory and registers
    most_parts: int = 4  # most programs that share a tile


# Tokens of a tile -> forms, measured on an H100 with the products of Qwen3-8B. Iterations of 128 columns are a tenth
# faster than of 64, and four warps are faster than eight; tiles of 128 weight rows read x less often. A gated tile has
# 64 + 64 rows. Up to 32 rows, where memory limits the speed, more programs have more loads in flight.
FORMS: dict[int, tuple[Form, ...]] = {
    16: (Form(64, 3, 4, 8),),
    32: (Form(64, 3, 4, 8),),
    64: (Form(64, 4, 2), Form(64, 3, 3)),
    MAX_BLOCK: (Form(128, 3, 2), Form(64, 3, 2)),
}
GATED_FORMS: dict[int, tuple[Form, ...]] = {
    16: (Form(128, 3, 3),),
    32: (Form(128, 3, 3),),
    64: (Form(128, 3, 2),),
    MAX_BLOCK: (Form(128, 3, 2),),
}


class Cut(NamedTuple):
    """How a product is divided."""

    block_m: int  # tokens
    block_n: int  # weight rows
    block_k: int  # columns per iteration
    whole: int  # number of tiles with one program each
    turns: int  # iterations of each further program
    stages: int
    warps: int


def cut_for(x: Tensor, weight: Packed, gated: bool) -> Cut:
    """The cut for rows x [M, K] times this weight on this device."""
    return cut_of(len(x), len(weight.codes), weight.depth, weight.group, gated, target().num_units)


def cut_of(rows: int, width: int, depth: int, group: int, gated: bool, units: int) -> Cut:
    """The cut for `rows` rows times a weight [width, depth] on a device of `units` units: the form that fills it
    best."""
    block_m = next((size for size in FORMS if rows <= size), MAX_BLOCK)
    forms = GATED_FORMS[block_m] if gated else FORMS[block_m]
    if len(forms) > 1 and block_m == MAX_BLOCK:  # the wide form, if it has enough tiles
        wide = triton.cdiv(rows, block_m) * triton.cdiv(width, forms[0].block_n) >= WIDE * units
        forms = forms[:1] if wide else forms[1:]
    return max((_cut(rows, width, depth, group, units, block_m, form) for form in forms), key=lambda cut: cut[0])[1]


def _cut(rows: int, width: int, depth: int, group: int, units: int, block_m: int, form: Form) -> tuple[float, Cut]:
    """(how full the device is, the cut) for this form; tiles after the last full wave have several programs each."""
    block_k = 128 if group % 128 == 0 else 64
    tiles, turns = triton.cdiv(rows, block_m) * triton.cdiv(width, form.block_n), triton.cdiv(depth, block_k)
    slots, most = form.programs * units, min(form.most_parts, max(1, turns // LEAST_TURNS))
    left = tiles % slots
    parts = min(slots // left, most) if left else 1
    # One program per unit has its own tile, the others share the rest; not for larger tiles, whose sums cost too much.
    if parts == 1 and units < left and form.block_n * block_m <= SHARED:
        left -= units
        parts = min((slots - units) // left, most)
    whole = tiles if parts == 1 else tiles - left
    programs = whole + (tiles - whole) * parts
    stages = form.stages if block_k == 128 else 2 * form.stages - 1
    cut = Cut(block_m, form.block_n, block_k, whole, triton.cdiv(turns, parts), stages, WARPS)
    return programs / (triton.cdiv(programs, slots) * slots), cut
