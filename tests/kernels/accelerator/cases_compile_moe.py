"""Kernels of experts compile for every target, with the tiles of Qwen3-30B-A3B and of Mixtral."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.activation import Activation
from engine.kernels.gemm.code_sums import scales_sums
from engine.kernels.gemm.groups import KINDS
from engine.kernels.gemm.widen import E2M1, E4M3, INT4
from engine.kernels.moe.coded import coded_kernel, coded_tile
from engine.kernels.moe.combine import BLOCK, combine_kernel
from engine.kernels.moe.expert_load import BLOCK as COUNTED
from engine.kernels.moe.expert_load import expert_load_kernel
from engine.kernels.moe.grouped import Tile, grouped_kernel, tile_of
from engine.kernels.moe.grouped_persistent import persistent_kernel
from engine.kernels.moe.mxfp4 import mxfp4_kernel, mxfp4_tile
from engine.kernels.moe.pairs import TURN, pairs_kernel
from engine.kernels.moe.pairs_float8 import pairs_float8_kernel
from engine.kernels.moe.route import BLOCK_K, BLOCK_M, BLOCK_N, route_kernel
from engine.kernels.moe.route_rows import WARPS, route_rows_kernel
from engine.kernels.moe.sort import BLOCKS, sort_kernel
from engine.kernels.moe.tiles import LINES
from engine.kernels.moe.values import values_kernel
from engine.kernels.target import Target
from tests.kernels.accelerator.targets import OVERLAPPING, TARGETS, cases, compiles, first_of_each

T = "*bf16"
ROUTE = {
    "chosen": "*i32", "weights": "*fp32", "capture": "*u8", "logits": "*fp32", "arrived": "*i32", "x": T, "router": T,
    "bias": T, "correction": "*fp32", "scales": "*fp32", "count": "*i32", "mapping": "*i64", "capture_line": "i32",
    "rows": "i32", "experts": "i32", "first": "i32", "depth": "i32", "eps": "fp32",
    "least_sum": "fp32", "scale": "fp32",
}  # fmt: skip
ROUTE_ROWS = {
    **{name: kind for name, kind in ROUTE.items() if name != "rows"},
    "normed": T,
    "gates": "*fp32",
    "gain": "*fp32",
    "gate": T,
    "norm_eps": "fp32",
}
GROUPED = {
    "out": T, "x": T, "weight": T, "bias": T, "weights": "*fp32", "order": "*i32", "ends": "*i32",
    "pairs": "i32", "experts": "i32", "width": "i32", "depth": "i32",
}  # fmt: skip
COMBINE = {
    "out": T, "gained": T, "counted": "*fp32", "made": T, "weights": "*fp32", "shared": T, "gate": T, "residual": T,
    "gain": "*fp32", "count": "*i32", "chosen": "*i32", "held": "i32", "width": "i32",
}  # fmt: skip
CODED = {
    "out": T, "x": T, "codes": "*i16", "scales": T, "zeros": "*i8", "row_scales": "*fp32", "bias": "*fp32",
    "weights": "*fp32", "order": "*i32", "ends": "*i32", "pairs": "i32", "experts": "i32", "width": "i32",
    "depth": "i32", "line": "i32", "groups": "i32",
}  # fmt: skip
MXFP4 = {
    "out": T, "x": T, "codes": "*i16", "scales": "*i32", "bias": "*fp32", "weights": "*fp32", "order": "*i32",
    "ends": "*i32", "partial": "*fp32", "arrived": "*i32", "pairs": "i32", "experts": "i32", "width": "i32",
    "depth": "i32",
}  # fmt: skip
OF_PAIRS = {
    "out": T, "x": "*i32", "words": "*i32", "scales": "*i32", "bias": "*fp32", "weights": "*fp32", "chosen": "*i32",
    "experts": "i32", "width": "i32", "runs": "i32", "blocks": "i32",
}  # fmt: skip
OF_PAIRS_FLOAT8 = {
    **OF_PAIRS, "scales": "*fp32", "row_scales": "*fp32", "rows": "i32", "height": "i32", "routed": "i32",
}  # fmt: skip
FLOAT_INPUTS = {
    **dict.fromkeys(("shared", "shared_scales", "shared_row_scales")),
    "x_scales": None,
    "FORM": 0,
    "TALL": 1,
    "GROUPED": False,
    "STATIC": False,
    "POWERS": False,
    "ROUNDS": False,
}
WITHOUT_CODES = {
    **dict.fromkeys(("codes", "code_scales", "given")), "STATIC": False, "POWERS": False, "GROUP": 0, "NATIVE": False,
}  # fmt: skip
OF = {number: kind for kind, number in KINDS.items()}


def coded(kind, group, each):
    """A gated product with quantised weights and `each` pairs per expert; 0: unsorted pairs."""
    tile = coded_tile(each, OF[kind], group, 2, 2)
    constants = {
        "TOP_K": 4, "SORTED": each > 0, "GATHER": True, "GATED": True, "ACT": 2, "EXPERTS": 32, "KIND": kind,
        "GROUP": group, "SCALES": True, "ZEROS": False, "ROW_SCALES": False,
        "ON_SUMS": scales_sums(kind, group, tile.block_k), "PAIRS": True, "EVEN": False, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "OVERLAP": True,
    }  # fmt: skip
    return coded_kernel, CODED, constants, {"num_warps": tile.warps, "num_stages": tile.stages}


def mxfp4(each, gated=True, weighed=False):
    """A product with MXFP4 weights."""
    tile = mxfp4_tile(Target("cuda", "sm_90", 132, 32, 227 << 10), each, 2, gated)
    constants = {
        "TOP_K": 4, "SORTED": each > 0, "GATHER": gated, "GATED": gated, "ACT": 2, "EXPERTS": 32, "PAIRS": True,
        "SPLITS": tile.splits, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "OVERLAP": True,
        **({} if weighed else {"weights": None}),
    }  # fmt: skip
    return mxfp4_kernel, MXFP4, constants, {"num_warps": tile.warps, "num_stages": 2}


def pairs(gated, **absent):
    """MXFP4 products of one row's pairs, with 2,880 columns."""
    constants = {
        "TOP_K": 4, "GATHER": gated, "FIRST": gated, "GATED": gated, "ACT": 2, "TURN": TURN, "TURNS": 3, "PAIRS": True,
        "OVERLAP": True, **absent,
    }  # fmt: skip
    return pairs_kernel, OF_PAIRS, constants, {"num_warps": 1, "num_stages": 1}


def pairs_float8(gated, turns, **absent):
    """FP8 products of one row's pairs, with 512 columns per iteration."""
    _, _, constants, options = pairs(gated, **absent)
    del constants["FIRST"]
    return pairs_float8_kernel, OF_PAIRS_FLOAT8, {**constants, **FLOAT_INPUTS, "TOP_K": 8, "TURNS": turns}, options


KERNELS = {
    "codes e2m1 gated": coded(E2M1, 16, 0),
    "mxfp4 many": mxfp4(64),
    "mxfp4 of a row": pairs(gated=True, weights=None),
    "mxfp4 of a row, second product": pairs(gated=False),
    "mxfp4 of a row, gate and up": pairs(gated=False, GATHER=True, FIRST=True, weights=None),
    "fp8 of a row": pairs_float8(True, 4, weights=None, row_scales=None, bias=None),
    "fp8 of a row, second product": pairs_float8(False, 2, weights=None, scales=None),
    "mxfp4 few": mxfp4(0),
    "mxfp4 few, weighed": mxfp4(0, weighed=True),
    "mxfp4 few, second product": mxfp4(0, gated=False),
    "codes fp8 blocks gated": coded(E4M3, 128, 64),
    **{
        f"route {name}": (
            route_kernel,
            {**ROUTE, "router": router},
            {"SIGMOID": sigmoid, "TOP_K": 8, "RENORMALISE": True, "GROUPS": groups, "TOPK_GROUP": kept,
             "SIZE": 256 // groups, "TWO": True, "COLUMNS": 256, "SLOTS": 8, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
             "BLOCK_K": BLOCK_K, "OVERLAP": True, "NEAR": None, **rest},
            {"num_warps": 4, "num_stages": 3},
        )
        for name, sigmoid, groups, kept, router, rest in (
            ("softmax", False, 1, 1, T, dict.fromkeys(("bias", "correction", "scales", "count", "capture", "mapping"))),
            ("groups", True, 8, 4, "*fp32", {}),
            ("of many rows", False, 1, 1, T, {"BLOCK_N": 64, **dict.fromkeys(("bias", "correction", "scales"))}),
            ("near", False, 1, 1, T, {**dict.fromkeys(("bias", "correction", "scales", "capture")), "NEAR": 0.02}),
        )
    },
    **{
        f"route of few rows {name}": (
            route_rows_kernel, {**ROUTE_ROWS, "router": router},
            {"SIGMOID": sigmoid, "TOP_K": 8, "RENORMALISE": True, "COLUMNS": experts, "BLOCK_N": 4,
             "BLOCK_K": 4096, "OVERLAP": True, **WITHOUT_CODES, **rest},
            {"num_warps": WARPS, "num_stages": 1},
        )
        for name, sigmoid, experts, router, rest in (
            ("softmax", False, 32, T, dict.fromkeys(("correction", "scales", "count", "capture", "mapping", "gate"))),
            ("sigmoid", True, 256, "*fp32", {}),
        )
    },
    **{
        f"sort {block}": (
            sort_kernel, {"order": "*i32", "ends": "*i32", "chosen": "*i32", "pairs": "i32"},
            {"BLOCK": block, "OVERLAP": True}, {"num_warps": warps},
        )
        for block, warps in BLOCKS.values()
    },
    "spread": (
        expert_load_kernel,
        {"out": "*i32", "choices": "*i32", "tops": "*i32", "num_rows": "*i32", "num_last": "*i32", "line": "i32",
         "experts": "i32"},
        {"BINS": 256, "BLOCK": COUNTED}, {"num_warps": 4},
    ),
    **{
        f"combine {name}": (
            combine_kernel, COMBINE, {"TOP_K": 8, "AFTER": after, "BLOCK": BLOCK, "OVERLAP": True, **rest},
            {"num_warps": 4},
        )
        for name, after, rest in (
            ("alone", False, dict.fromkeys(("weights", "shared", "gate", "residual", "count", "chosen"))),
            ("whole", True, {"chosen": None}), ("of a rank", False, dict.fromkeys(("gate", "residual"))),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("each", [0, 16, 32, 64, 128])  # pairs per expert; 0: unsorted
@pytest.mark.parametrize("gated", [False, True])
def test_grouped_products_compile(target, each, gated):
    device, shared = TARGETS[target]
    described = Target("cuda" if device.backend == "cuda" else "hip", target, 100, device.warp_size, shared)
    experts = 128
    tile = tile_of(described, each * experts, experts, gated, 2)
    constants = {"TOP_K": 8, "SORTED": each > 0, "GATHER": gated, "GATED": gated, "ACT": 0, "EXPERTS": experts,
                 "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN": True,
                 "OVERLAP": True, "bias": None, "weights": None}  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiles(target, grouped_kernel, GROUPED, constants, options, aligned=True)
    if target == "sm_90":
        assert "st.local" not in made.asm["ptx"]
        assert ("wgmma" in made.asm["ptx"]) == (tile.block_n >= 64)


ACTIVATIONS = [
    pytest.param(each, marks=() if each in (Activation.SILU, Activation.CLAMPED_SWIGLU) else pytest.mark.full)
    for each in Activation
]
PERSISTENT_TILES = sorted(
    {(shape.gated, tile) for shape, line in LINES["sm_90"]["bfloat16"].items() for tile in line if tile.persistent}
)


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("gated", "tile"), PERSISTENT_TILES)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("whole", [False, True])  # depth is a multiple of a block; without bias and weights
@pytest.mark.parametrize("target", sorted(OVERLAPPING))
def test_persistent_products_compile(target, gated, tile, gather, activation, whole):
    halves, gather = 2 if gated else 1, gather or gated
    signature = {**GROUPED, "weight": f"tensordesc<bf16[{halves},{tile.block_n},{tile.block_k}]>"}
    del signature["pairs"]
    if not gather:
        signature["x"] = f"tensordesc<bf16[{tile.block_m},{tile.block_k}]>"
    constants = {"TOP_K": 8, "GATHER": gather, "GATED": gated, "ACT": int(activation), "EXPERTS": 128,
                 "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n * halves // 2, "BLOCK_K": tile.block_k,
                 "EVEN": whole, "OVERLAP": True, **({"bias": None, "weights": None} if whole else {})}  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiles(target, persistent_kernel, signature, constants, options, aligned=True)
    if target == "sm_90":  # one instruction for gate and up; rows are prefetched
        ptx = made.asm["ptx"]
        assert f"wgmma.mma_async.sync.aligned.m64n{tile.block_n * halves}k16" in ptx
        assert ptx.count("cp.async.cg.shared.global") >= 4 * tile.stages * gather
        assert "cp.async.bulk.tensor.3d" in ptx
        assert "st.local" not in ptx


VALUES = {
    "out": T, "x": T, "scales": T, "zeros": "*i8", "row_scales": "*fp32", "bias": "*fp32", "weights": "*fp32",
    "order": "*i32", "ends": "*i32", "pairs": "i32", "experts": "i32", "width": "i32", "depth": "i32", "groups": "i32",
}  # fmt: skip
NVFP4 = [("E2M1 by 16", True, Tile(64, 64, 64, 3, 4, values=True))]
OF_VALUES = [
    (form, shape.gated, tile)
    for form, shapes in LINES["sm_90"].items()
    for shape, line in shapes.items()
    for tile in dict.fromkeys(line)
    if tile.values
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "gated", "tile"), first_of_each(NVFP4 + OF_VALUES, lambda case: case[:2]))
@pytest.mark.parametrize("even", [True, False])
def test_products_whose_scales_multiply_values_compile(form, gated, tile, even):
    """Compiled for Hopper only; no register is spilled."""
    kind, group = {
        "MXFP4": (E2M1, 32),
        "INT4 by 128": (INT4, 128),
        "E4M3 by 128": (E4M3, 128),
        "E2M1 by 16": (E2M1, 16),
    }[form]
    sides = 2 if gated else 1
    signature = {
        **VALUES,
        "words": f"tensordesc<i16[{sides},{tile.block_n},{tile.block_k // (2 if kind == E4M3 else 4)}]>",
        "scales": "*i32" if form == "MXFP4" else "*fp32" if kind == E4M3 else T,
    }
    if not gated:
        signature["x"] = f"tensordesc<bf16[{tile.block_m},{tile.block_k}]>"
    constants = {
        "TOP_K": 4, "GATED": gated, "ACT": int(Activation.CLAMPED_SWIGLU), "EXPERTS": 32, "KIND": kind, "GROUP": group,
        "SCALES": True, "ZEROS": kind == INT4, "ROW_SCALES": False, "PAIRED": form == "MXFP4", "PAIRS": True,
        "EVEN": even, "BLOCK_M": tile.block_m, "ROWS": tile.block_n * sides, "BLOCK_K": tile.block_k, "OVERLAP": True,
        "weights": None,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiles("sm_90", values_kernel, signature, constants, options, aligned=True)
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.block_m}k16" in made.asm["ptx"]
    assert "st.local" not in made.asm["ptx"]
