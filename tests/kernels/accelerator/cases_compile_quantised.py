"""Products with quantised weights compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.activation import Activation
from engine.kernels.gemm.code_sums import scales_sums
from engine.kernels.gemm.float8 import float8_kernel
from engine.kernels.gemm.float8 import tile_of as float8_tile_of
from engine.kernels.gemm.float8_few import few_tile_of, float8_few_kernel
from engine.kernels.gemm.float8_row import float8_row_kernel
from engine.kernels.gemm.float8_rows import float8_rows_kernel
from engine.kernels.gemm.groups import KINDS, codes_kernel, tile_of
from engine.kernels.gemm.one_row import one_row_kernel
from engine.kernels.gemm.quantise_floats import quantise_floats_kernel
from engine.kernels.gemm.quantise_rows import quantise_rows_kernel
from engine.kernels.gemm.scaled_values import scaled_values_kernel
from engine.kernels.gemm.value_cuts import cut_of
from engine.kernels.gemm.widen import E2M1, E4M3, INT4, INT8, NF4
from engine.kernels.gemm.widen_weight import ELEMENTS, block_k_of, widen_weight_kernel
from tests.kernels.accelerator.targets import OVERLAPPING, assert_four_words_a_thread, cases, compiles

T = "*bf16"
PRODUCT = {
    "out": T, "partial": "*fp32", "arrived": "*i32", "x": T, "codes": "*i16", "scales": T, "zeros": "*i8",
    "row_scales": "*fp32", "x_scales": "*fp32", "bias": "*fp32", "residual": T, "rows": "i32", "width": "i32",
    "depth": "i32", "line": "i32", "groups": "i32", "x_stride": "i32", "parts": "i32", "part_len": "i32",
}  # fmt: skip
EXACT = {**PRODUCT, "partial": "*i32", "x": "*i8", "codes": "*i8"}
ROWS = {"out": "*i8", "scales": "*fp32", "x": T, "given": "*fp32", "width": "i32", "x_stride": "i32"}
WHOLE = {
    "out": T, "words": "*i16", "scales": T, "zeros": "*i8", "row_scales": "*fp32", "width": "i32", "depth": "i32",
    "line": "i32", "groups": "i32",
}  # fmt: skip
FLOATS8 = {
    "out": T, "partial": "*fp32", "arrived": "*i32", "x": "*u8", "x_scales": "*fp32", "codes": "*u8", "scales": "*fp32",
    "bias": "*fp32", "residual": T, "rows": "i32", "width": "i32", "depth": "i32", "groups": "i32", "parts": "i32",
    "part_len": "i32",
}  # fmt: skip
FLOATS = {
    "out": "*u8", "scales": "*fp32", "normed": T, "x": T, "gain": T, "given": "*fp32", "rows": "i32", "width": "i32",
    "x_stride": "i32", "eps": "fp32",
}  # fmt: skip
VALUES = {
    "out": T, "partial": "*fp32", "arrived": "*i32", "scales": T, "zeros": "*i8", "row_scales": "*fp32",
    "bias": "*fp32", "residual": T, "rows": "i32", "width": "i32", "depth": "i32", "groups": "i32", "whole": "i32",
    "run": "i32",
}  # fmt: skip
ADDS = ("residual", "gained", "counted", "gain")
ONE_ROW = {
    "out": T, "gained": T, "counted": "*fp32", "x": "*i32", "words": "*i32", "scales": T, "zeros": "*i8",
    "row_scales": "*fp32", "bias": "*fp32", "residual": T, "gain": "*fp32", "squares": "*fp32", "width": "i32",
    "depth": "i32", "line": "i32", "groups": "i32", "blocks": "i32", "parts": "i32", "eps": "fp32",
}  # fmt: skip
FLOAT8_ROW = {
    "out": T, "x": "*i32", "x_scales": "*fp32", "gain": "*fp32", "squares": "*fp32", "words": "*i32",
    "scales": "*fp32", "bias": "*fp32", "residual": T, "further": "*i32", "width": "i32", "parts": "i32",
    "programs": "i32", "runs": "i32", "groups": "i32", "blocks": "i32", "eps": "fp32",
}  # fmt: skip

TWO_PROGRAMS = (228 << 10) // 2 - 1024  # shared memory in bytes per program if two programs share a multiprocessor
OF = {number: kind for kind, number in KINDS.items()}


def product(kind, rows, group, scales=True, zeros=False, exact=False, apart=False):
    """The arguments of a launch with `rows` rows."""
    tile = tile_of(rows, 4096, 4096, OF[kind], group, 1 if exact else 2, 2)
    constants = {
        "KIND": kind, "GROUP": group, "SCALES": scales, "ZEROS": zeros, "ROW_SCALES": not scales, "EXACT": exact,
        "BIAS": True, "RESIDUAL": True, "APART": apart,
        "ON_SUMS": scales_sums(kind, group, tile.block_k), "PAIRS": not exact, "EVEN": True, "PREFETCH": 4,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "OVERLAP": True,
    }  # fmt: skip
    return codes_kernel, EXACT if exact else PRODUCT, constants, {"num_warps": tile.warps, "num_stages": tile.stages}


def float_zeros(kernel, signature, constants, options):
    return kernel, {**signature, "zeros": "*fp32", "scales": "*fp32"}, constants, options


def halves(kernel, signature, constants, options):
    return kernel, {**signature, "scales": "*fp16"}, constants, options


def whole(kind, group, scales=True, zeros=False):
    constants = {
        "KIND": kind, "GROUP": group, "SCALES": scales, "ZEROS": zeros, "ROW_SCALES": not scales, "PAIRS": kind != NF4,
        "BLOCK_N": ELEMENTS // block_k_of(group), "BLOCK_K": block_k_of(group),
    }  # fmt: skip
    return widen_weight_kernel, WHOLE, constants, {}


def floats8(rows, blocked, apart=False):
    """FP8 weights by FP8 inputs: the arguments of a launch with `rows` rows."""
    tile = float8_tile_of(rows, 4096, 4096, 2)
    constants = {
        "BLOCKED": blocked, "NATIVE": True, "KIND": E4M3, "BIAS": True, "RESIDUAL": True, "APART": apart,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "OVERLAP": True,
    }  # fmt: skip
    return float8_kernel, FLOATS8, constants, {"num_warps": tile.warps, "num_stages": tile.stages}


def rows_to_floats(group, normed=False, static=False, act=-1):
    constants = {
        "NORM": normed,
        "ACT": act,
        "STATIC": static,
        "POWERS": bool(group),
        "GROUP": group,
        "BLOCK": 4096,
        "NATIVE": True,
        "OVERLAP": True,
        **({} if normed else {"normed": None}),
    }
    return quantise_floats_kernel, FLOATS, constants, {"num_warps": 8}


def one_row(group, gated=False, zeros=False, once=True):
    """A layer's product: after a norm, gated or not; or one that adds to the stream and prepares the next norm."""
    adds = not gated
    left = {"row_scales", "bias", *(() if zeros else ("zeros",)), *(("squares",) if adds else ADDS)}
    constants = {
        "GROUP": group, "GATED": gated, "ACT": 0, "PARTS": 512, "ONCE": once, "BLOCK_N": 4 if gated else 8,
        "WORDS": 512, "OVERLAP": True, **dict.fromkeys(sorted(left)),
    }  # fmt: skip
    return one_row_kernel, ONE_ROW, constants, {"num_warps": 4, "num_stages": 1}


def float8_row(blocked, made=False, normed=False, act=-1, warps=1, further=False):
    # 1024 columns: with the iterations of 4096 columns the same instructions would repeat four times.
    constants = {
        "BLOCKED": blocked, "NATIVE": True, "KIND": E4M3, "MADE": made, "ACT": act, "STATIC": False, "POWERS": False,
        "ROUNDS": True, "PAIRS": made, "TURN": 128 * warps, "TURNS": 2, "PARTS": 4, "DEPTH": 1024, "OVERLAP": True,
    }  # fmt: skip
    absent = ([] if normed else ["gain"]) + (["x_scales"] if made else [])
    absent += ["residual"] if further else ["squares", "further"]
    constants |= dict.fromkeys(absent)
    signature = {name: kind for name, kind in FLOAT8_ROW.items() if name not in constants}
    return float8_row_kernel, signature, constants, {"num_warps": warps, "num_stages": 1}


def float8_rows(residual=False, **given):
    constants = {
        "NATIVE": True, "KIND": E4M3, "CHUNKS": 2, "TURNS": 4, "WARPS": 4,
        "OVERLAP": True,
        **given,
    }  # fmt: skip
    constants |= {} if residual else {"residual": None, "bias": None}
    kinds = {**FLOAT8_ROW, "rows": "i32"}
    signature = {name: kinds[name] for name in float8_rows_kernel.arg_names if name not in constants}
    return float8_rows_kernel, signature, constants, {"num_warps": 4, "num_stages": 1}


def for_target(name, target):
    """A kernel's arguments; a row of floats is read in pairs where instructions quantise pairs."""
    kernel, signature, constants, options = KERNELS[name]
    if constants.get("MADE") and target not in OVERLAPPING:
        constants = {**constants, "NATIVE": False, "ROUNDS": False, "PAIRS": False}
        signature = {**signature, **{name: T for name in ("x", "further") if name in signature}}
    return kernel, signature, constants, options


KERNELS = {
    "one row, 128": one_row(128),
    "one row, 32, gated, zeros": one_row(32, gated=True, zeros=True),
    "one row, 128, in turns": one_row(128, once=False),
    "one row of fp8": float8_row(False),
    "one row of fp8, blocks": float8_row(True),
    "one row that becomes fp8, normed, blocks": float8_row(True, True, normed=True),
    "one row that becomes fp8, with rows of floats": float8_row(True, True, further=True),
    "one row that becomes fp8, activated, blocks": float8_row(True, True, act=int(Activation.SILU), warps=2),
    "a few rows of fp8, blocks": float8_rows(residual=True),
    "int4 128": product(INT4, 16, 128, apart=True),
    "int4 32 zeros": product(INT4, 64, 32, zeros=True),
    "int4 128 zeros": halves(*product(INT4, 64, 128, zeros=True)),
    "int4 32 float zeros": float_zeros(*product(INT4, 16, 32, zeros=True)),
    "e2m1 16": product(E2M1, 32, 16),
    "nf4 64": product(NF4, 16, 64, apart=True),
    "int8 exact": product(INT8, 64, 4096, scales=False, exact=True, apart=True),
    "e4m3 rows": product(E4M3, 64, 4096, scales=False),
    "e4m3 blocks": product(E4M3, 16, 128, apart=True),
    "int4 128 whole": whole(INT4, 128),
    "int4 32 whole, zeros": whole(INT4, 32, zeros=True),
    "int4 128 whole, zeros": halves(*whole(INT4, 128, zeros=True)),
    "e2m1 16 whole": whole(E2M1, 16),
    "nf4 64 whole": whole(NF4, 64),
    "int8 whole": whole(INT8, 4096, scales=False),
    "e4m3 whole": whole(E4M3, 128),
    "quantised rows": (quantise_rows_kernel, ROWS, {"STATIC": False, "BLOCK": 1024, "OVERLAP": True}, {}),
    "quantised rows static": (quantise_rows_kernel, ROWS, {"STATIC": True, "BLOCK": 1024, "OVERLAP": True}, {}),
    "fp8 rows, few": floats8(16, blocked=False, apart=True),
    "fp8 rows, many": floats8(512, blocked=False),
    "fp8 blocks, any": floats8(None, blocked=True),
    "fp8 blocks, many": floats8(512, blocked=True),
    "fp8 rows, any": floats8(None, blocked=False, apart=True),
    "fp8 blocks, few": floats8(16, blocked=True, apart=True),
    "rows to fp8": rows_to_floats(0),
    "rows to fp8, normed": rows_to_floats(0, normed=True),
    "rows to fp8, by a number": rows_to_floats(0, static=True),
    "rows to fp8, by groups": rows_to_floats(128, normed=True),
    "rows to fp8, activated": rows_to_floats(0, act=int(Activation.SILU)),
    "rows to fp8, activated, by groups": rows_to_floats(128, act=int(Activation.SILU)),
}


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    made = compiles(target, *for_target(name, target))
    # To the nearest, ties to even, like the integer version.
    if name.startswith("rows to fp8") and target in OVERLAPPING:
        assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]


@pytest.mark.parametrize(
    ("kind", "gated", "rows", "group", "zeros", "scales"),
    [
        (INT4, False, 128, 128, False, "*bf16"),
        (INT4, True, 128, 128, True, "*fp16"),
        pytest.param(INT4, True, 128, 128, True, "*fp32", marks=pytest.mark.full),
        (INT4, True, 32, 128, False, "*bf16"),
        pytest.param(INT4, False, 64, 128, False, "*bf16", marks=pytest.mark.full),
        pytest.param(E2M1, False, 512, 32, False, "*bf16", marks=pytest.mark.full),
        pytest.param(NF4, True, 512, 64, False, "*fp32", marks=pytest.mark.full),
        pytest.param(INT4, False, 512, 4096, False, None, marks=pytest.mark.full),
    ],
)
def test_scales_on_values_compile(kind, gated, rows, group, zeros, scales):
    """Compiled for Hopper only; two programs share a multiprocessor."""
    cut = cut_of(rows, 24576, 4096, group, gated, 132)
    rows_of_words = f"2,{cut.block_n // 2}" if gated else f"{cut.block_n}"
    signature = {
        **VALUES, "scales": scales or T, "x": f"tensordesc<bf16[{cut.block_m},{cut.block_k}]>",
        "words": f"tensordesc<i16[{rows_of_words},{cut.block_k // 4}]>",
    }  # fmt: skip
    constants = {
        "KIND": kind, "GROUP": group, "SCALES": scales is not None, "ZEROS": zeros, "ROW_SCALES": scales is None,
        "BIAS": True, "RESIDUAL": not gated, "GATED": gated, "ACT": 0, "PAIRS": True,
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "OVERLAP": True,
    }  # fmt: skip
    options = {"num_warps": cut.warps, "num_stages": cut.stages}
    made = compiles("sm_90", scaled_values_kernel, signature, constants, options, aligned=True)
    assert f"wgmma.mma_async.sync.aligned.m64n{cut.block_m}k16" in made.asm["ptx"]
    assert "st.local" not in made.asm["ptx"]
    assert made.metadata.shared <= TWO_PROGRAMS


@pytest.mark.parametrize(
    ("rows", "blocked"), [(16, True), (16, False), pytest.param(32, False, marks=pytest.mark.full), (64, True)]
)
def test_few_rows_of_fp8_compile(rows, blocked):
    """Compiled for Hopper only; two programs share a multiprocessor."""
    tile = few_tile_of(rows, 6144, 4096)
    signature = {
        **{name: FLOATS8[name] for name in float8_few_kernel.arg_names if name in FLOATS8},
        "x": f"tensordesc<fp8e4nv[{tile.block_m},{tile.block_k}]>",
        "codes": f"tensordesc<fp8e4nv[{tile.block_n},{tile.block_k}]>", "scale_line": "i32",
    }  # fmt: skip
    constants = {
        "PARTS": 2, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "BLOCKED": blocked, "OVERLAP": True,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiles("sm_90", float8_few_kernel, signature, constants, options, aligned=True)
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.block_m}k32.f32.e4m3.e4m3" in made.asm["ptx"]
    assert "st.local" not in made.asm["ptx"]
    assert made.metadata.shared <= TWO_PROGRAMS


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "form",
    [
        float8_row(True),
        float8_row(False),
        float8_row(True, True, warps=2),
        float8_row(True, True, further=True),
        float8_row(True, True, normed=True, warps=4),
        float8_row(False, True, act=int(Activation.SILU)),
        float8_rows(),
        float8_rows(CHUNKS=1),
    ],
)
@pytest.mark.parametrize("blocks", [1, None])
def test_words_of_a_row_lie_in_threads_as_their_instruction_takes_them(form, blocks):
    """Triton makes an argument of 1 a constant: then there is no loop over blocks."""
    kernel, signature, constants, options = form
    if blocks is not None:
        constants = {**constants, "blocks": blocks}
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    assert_four_words_a_thread(compiles("sm_90", kernel, signature, constants, options, aligned=True))
