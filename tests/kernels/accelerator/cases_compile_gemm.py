"""Products and the rotary table compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.gemm.dense_row import RowCut, dense_row_kernel
from engine.kernels.gemm.epilogue import padded
from engine.kernels.gemm.gated_one_wave import (
    BLOCK_K,
    NARROW,
    SHARED_MEMORY,
    STAGES,
    WARPS,
    WIDE,
    columns_of,
    one_wave_kernel,
)
from engine.kernels.gemm.gated_one_wave import (
    MAX_ROWS as WAVE_ROWS,
)
from engine.kernels.gemm.gated_persistent import DESCRIBED, POINTED, gated_kernel
from engine.kernels.gemm.invariant import invariant_kernel, tile_of
from engine.kernels.gemm.split_k import Split, split_kernel, tiled_kernel
from engine.kernels.room import MAX_ROWS
from engine.kernels.rope import angle_kernel
from engine.kernels.target import Target
from engine.kernels.tune import CLASSES, LEAST_FILL, ONE_WAVE, SHAPES, choose, fills, in_one_wave
from engine.step.sizes import decode_sizes, one_size_per_doubling
from tests.kernels.accelerator.targets import OVERLAPPING, TARGETS, cases, compiles, first_of_each, in_float16

T = "*bf16"
TILE = tile_of(4096, 4096, 2)
DENSE_ROW = {
    "out": T, "gained": T, "counted": "*fp32", "x": T, "weight": T, "bias": T, "residual": T, "gain": "*fp32",
    "squares": "*fp32", "width": "i32", "depth": "i32", "parts": "i32", "eps": "fp32",
}  # fmt: skip
INVARIANT = {
    "out": T, "partial": "*fp32", "arrived": "*i32", "x": T, "weight": T, "bias": T, "residual": T,
    "rows": "i32", "width": "i32", "depth": "i32", "x_stride": "i32", "parts": "i32", "part_len": "i32",
}  # fmt: skip
SPLIT = {
    **INVARIANT, "gained": T, "counted": "*fp32", "gain": "*fp32", "squares": "*fp32", "eps": "fp32",
}  # fmt: skip
GATED = {
    "out": T, "x": T, "weight": T, "bias": T, "rows": "i32", "width": "i32", "depth": "i32", "x_stride": "i32",
}  # fmt: skip
TILED = {**{name: kind for name, kind in SPLIT.items() if name != "x_stride"}, "plain": T}
ANGLE = {
    "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "inv_freq": "*fp32", "num_tokens": "i32", "half": "i32",
    "axis_stride": "i32", "first_end": "i32", "second_end": "i32", "scaling": "fp32",
}  # fmt: skip
KERNELS = {
    **{
        f"split {rows} gated {gated} {splits} parts {parts}": (
            split_kernel,
            SPLIT,
            {"BIAS": True, "RESIDUAL": not parts, "GATED": gated, "ACT": 1 if rows == 16 else 2, "SPLITS": splits,
             "PARTS": parts, "AFTER": not parts, "BLOCK_M": rows,
             "BLOCK_N": 64, "BLOCK_K": 64, "EVEN": even, "PREFETCH": 4, "OVERLAP": True},
            {"num_warps": 4, "num_stages": 3},
        )
        for rows, gated, splits, parts, even in (
            (16, False, 4, 0, True), (64, False, 1, 0, False), (16, False, 2, 64, True),
            (64, False, 1, 1, False), (16, True, 4, 16, True), (64, True, 1, 64, True),
        )
    },
    **{
        f"one row gated {gated}": (
            dense_row_kernel, DENSE_ROW,
            {"GATED": gated, "ACT": 1, "PARTS": 512, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k,
             "TURNS": -(-2880 // cut.block_k), "OVERLAP": True, **dict.fromkeys(absent)},
            {"num_warps": cut.warps, "num_stages": 1},
        )
        for gated, cut, absent in (
            (False, RowCut(2, 256, 1), ("squares",)),
            (True, RowCut(2, 1024, 4), ("gained", "counted", "residual", "gain")),
        )
    },
    **{
        f"invariant apart {apart}": (
            invariant_kernel,
            INVARIANT,
            {"BIAS": True, "RESIDUAL": True, "APART": apart, "GROUP": 8, "EVEN": True, "OVERLAP": True,
             "BLOCK_M": TILE.block_m, "BLOCK_N": TILE.block_n, "BLOCK_K": TILE.block_k},
            {"num_warps": TILE.warps, "num_stages": TILE.stages},
        )
        for apart in (False, True)
    },
    **{
        f"angle {axes} {turns}": (
            angle_kernel, ANGLE | ({"third_end": "i32"} if axes == 4 else {}),
            {"SEVERAL": axes > 1, "INTERLEAVED": turns == "all", "SIDES": turns == "sides", "TOKENS": 4, "BLOCK": 64,
             "OVERLAP": True}
            | ({} if axes == 4 else {"third_end": None}),
            {"num_warps": 4},
        )
        for axes, turns in ((1, ""), (3, ""), (3, "all"), (3, "sides"), (4, ""))
    },
}  # fmt: skip
KERNELS |= in_float16(KERNELS, "split 16 gated False 4 parts 0", "invariant apart True")


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("activation", "bias"), [(0, False), (0, True), (1, False), (2, True)])
@pytest.mark.parametrize(
    ("target", "tile"), [*((name, POINTED) for name in TARGETS), *((name, DESCRIBED) for name in sorted(OVERLAPPING))]
)
def test_gated_products_compile(target, tile, activation, bias):
    signature, described = GATED, tile is DESCRIBED
    if described:
        m, n, k, *_ = tile
        signature = {
            **GATED, "out": f"tensordesc<bf16[{m},{n}]>", "x": f"tensordesc<bf16[{m},{k}]>",
            "weight": f"tensordesc<bf16[2,{n},{k}]>",
        }  # fmt: skip
    constants = {"BIAS": bias, "ACT": activation, "DESCRIBED": described, "GROUP": 16, "BLOCK_M": tile.block_m,
                 "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "OVERLAP": True}  # fmt: skip
    made = compiles(target, gated_kernel, signature, constants, {"num_warps": tile.warps, "num_stages": tile.stages})
    if described and target == "sm_90":  # one instruction for gate and up
        assert "wgmma.mma_async.sync.aligned.m64n256k16" in made.asm["ptx"]
        assert "st.local" not in made.asm["ptx"]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("activation", "bias"),
    [(0, False), (2, True), *(pytest.param(*each, marks=pytest.mark.full) for each in ((0, True), (1, False)))],
)
@pytest.mark.parametrize("width", [12288, 18944])
@pytest.mark.parametrize("target", sorted(OVERLAPPING))
def test_gated_products_in_one_wave_compile(target, width, activation, bias):
    block_m, (first, second) = WAVE_ROWS, columns_of(width)
    signature = {
        "out": f"tensordesc<bf16[{block_m},{first}]>", "out_rest": f"tensordesc<bf16[{block_m},{second}]>",
        "x": f"tensordesc<bf16[{block_m},{BLOCK_K}]>", "weight": f"tensordesc<bf16[2,{first},{BLOCK_K}]>",
        "weight_rest": f"tensordesc<bf16[2,{second},{BLOCK_K}]>", "bias": T, "width": "i32", "depth": "i32",
    }  # fmt: skip
    constants = {"BIAS": bias, "ACT": activation, "BLOCK_M": block_m, "FIRST": first, "SECOND": second,
                 "BLOCK_K": BLOCK_K, "OVERLAP": True}  # fmt: skip
    made = compiles(target, one_wave_kernel, signature, constants, {"num_warps": WARPS, "num_stages": STAGES})
    if target == "sm_90":  # the only target with entries in kernels/tune
        for columns in (2 * first, 2 * second):  # one instruction for gate and up
            assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16" in made.asm["ptx"]
        assert "st.local" not in made.asm["ptx"]
        assert made.metadata.shared <= SHARED_MEMORY


CUTS = sorted(
    {
        (min(rows, MAX_ROWS), depth if cut.block_m else 4096, gated, cut)
        for (_, depth, gated), choice in SHAPES["sm_90"].items()
        for rows, cut in zip(CLASSES, choice)
        if cut is not None
    }
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "gated", "cut"),
    first_of_each(CUTS, lambda case: (case[2], case[3].block_m > 0)),
)
def test_every_cut_of_the_table_compiles_and_fits(rows, depth, gated, cut, after):
    """Products after a norm (squares per 64 columns), before one, or without; a gated product is never before one."""
    constants = {"BIAS": False, "RESIDUAL": after, "GATED": gated, "ACT": 0, "SPLITS": cut.splits,
                 "PARTS": 0 if after else padded(depth // 64, 1), "AFTER": after and not gated, "BLOCK_N": cut.block_n,
                 "BLOCK_K": cut.block_k, "PREFETCH": 4, "OVERLAP": True}  # fmt: skip
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    if not cut.block_m:
        compiles("sm_90", split_kernel, SPLIT, {**constants, "BLOCK_M": rows, "EVEN": True}, options)
        return
    made = compiles("sm_90", tiled_kernel, tiled(cut, gated), {**constants, "BLOCK_M": cut.block_m}, options)
    assert f"wgmma.mma_async.sync.aligned.m64n{cut.block_n * (1 + gated)}k16" in made.asm["ptx"]
    assert "st.local" not in made.asm["ptx"]


def tiled(cut, gated):
    """The types of tiled_kernel's arguments."""
    blocks = {"x": [cut.block_m, cut.block_k], "weight": [*[2] * gated, cut.block_n, cut.block_k]}
    return {**TILED, **{name: f"tensordesc<bf16[{','.join(map(str, block))}]>" for name, block in blocks.items()}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("gated", "parts", "after"), [(False, 0, True), (False, 16, False), (True, 4, False)])
def test_products_in_tiles_compile(gated, parts, after, splits, target):
    cut = Split(32, 32, splits, 3, 4, 64)
    constants = {"BIAS": True, "RESIDUAL": after, "GATED": gated, "ACT": int(gated), "SPLITS": splits, "PARTS": parts,
                 "AFTER": after, "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "PREFETCH": 4,
                 "OVERLAP": True}  # fmt: skip
    compiles(target, tiled_kernel, tiled(cut, gated), constants, {"num_warps": cut.warps, "num_stages": cut.stages})


def test_shapes_outside_the_table_go_by_the_rule_and_other_cards_to_the_vendor():
    hopper = Target("cuda", "sm_90", 132, 32, 227 << 10)
    assert choose(hopper, 1, 5120, 5120, False) is None  # 80 programs for 132 multiprocessors
    assert choose(hopper, 32, 2048, 2048, False) == Split(64, 256, 4, 3, 4)
    assert choose(hopper, 33, 2048, 2048, False) is None
    assert choose(hopper, 1, 9728, 2560, True) == Split(32, 128, 1, 4, 4)
    assert choose(hopper, 1, 2048, 2050, False) is None
    assert choose(hopper, 17, 4096, 1024, False) == SHAPES["sm_90"][4096, 1024, False][1]
    for number, most in enumerate(CLASSES):
        assert choose(hopper, most, 4096, 1024, False) == SHAPES["sm_90"][4096, 1024, False][number]
    assert choose(hopper, CLASSES[-1] + 1, 4096, 1024, False) is None
    assert choose(hopper, 65, 6144, 4096, False) is None
    assert choose(hopper, 0, 4096, 1024, False) is None
    assert choose(Target("hip", "gfx942", 304, 64, 64 << 10), 1, 4096, 1024, False) is None


def test_a_start_meets_every_class_of_rows():
    assert set(CLASSES) <= set(one_size_per_doubling(decode_sizes(256)))


def test_gated_products_are_in_one_wave_where_it_was_measured():
    hopper, shape, wide = Target("cuda", "sm_90", 132, 32, 227 << 10), (12288, 4096), (18944, 3584)
    assert ONE_WAVE["sm_90"].keys() == {shape, wide}
    assert (columns_of(wide[0]), columns_of(shape[0])) == (WIDE, NARROW)
    for known in (shape, wide):
        assert all(in_one_wave(hopper, rows, *known) for rows in (96, 128))
        assert not any(in_one_wave(hopper, rows, *known) for rows in (1, 64, 95, 129, 193, 256))
    assert not in_one_wave(Target("cuda", "sm_90", 131, 32, 227 << 10), 128, *wide)
    assert not in_one_wave(hopper, 128, 12280, 4096)
    assert not in_one_wave(hopper, 128, 12288, 4104)
    # A second wave of tiles; too little shared memory for a program.
    for units, shared in ((127, 227 << 10), (132, 200 << 10)):
        assert not in_one_wave(Target("cuda", "sm_90", units, 32, shared), 128, *shape)
    assert not in_one_wave(Target("cuda", "sm_100", 148, 32, 227 << 10), 128, *shape)
    assert not in_one_wave(Target("hip", "gfx942", 304, 64, 64 << 10), 128, *shape)


def test_gated_products_of_many_rows_are_ours_where_they_fill_their_rounds():
    hopper, other = Target("cuda", "sm_90", 132, 32, 227 << 10), Target("hip", "gfx942", 304, 64, 64 << 10)
    filled = {  # measured on 132 multiprocessors
        (12288, 4096): ({512, 1024, 2048}, {513, 576, 768}),
        (3072, 1024): ({2048}, {512, 1024}),
        (9728, 2560): ({1024, 2048}, {512}),
        (18944, 3584): ({512, 576, 1024, 2048}, set()),
        (11008, 2048): ({512, 768, 832}, {576}),  # a shape outside the table
    }
    assert LEAST_FILL["sm_90"].keys() < filled.keys()
    for shape, (ours, theirs) in filled.items():
        assert all(fills(hopper, rows, *shape) for rows in ours)
        assert not any(fills(hopper, rows, *shape) for rows in theirs)
        assert not any(fills(other, rows, *shape) for rows in ours)
    assert not fills(hopper, 2048, 12288, 4100)
    assert not fills(hopper, 2048, 12292, 4096)
