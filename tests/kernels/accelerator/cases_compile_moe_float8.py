"""Kernels of experts with FP8 weights and FP8 inputs compile for every target, in the shapes of Qwen3-30B-A3B."""

import re

import pytest
import triton
import triton.language as tl

from engine.kernels.activation import Activation
from engine.kernels.gemm.widen import E4M3
from engine.kernels.moe.float8 import LEAST_LEFT, float8_experts_kernel, float8_tile
from engine.kernels.moe.pairs_codes import CODES, FLOATS, MADE
from engine.kernels.moe.pairs_float8 import pairs_float8_kernel
from engine.kernels.moe.route_rows import route_rows_kernel
from engine.kernels.target import Target
from tests.kernels.accelerator import cases_compile_moe as others
from tests.kernels.accelerator.targets import FLOAT8, OVERLAPPING, TARGETS, assert_four_words_a_thread, cases, compiles

assert triton
SORTED = {
    "out": "*bf16", "out_scales": "*fp32", "x": "*fp8e4nv", "x_scales": "*fp32",
    "codes": "*fp8e4nv", "scales": "*fp32", "bias": "*fp32", "weights": "*fp32", "order": "*i32", "ends": "*i32",
    "tokens": "i32", "pairs": "i32", "experts": "i32", "width": "i32", "depth": "i32", "height": "i32",
}  # fmt: skip
SMALL = {"gfx942", "gfx1100"}  # shared memory for one stage of a tile only


def pairs(form, gated, turns, **settings):
    """Products of one row's pairs with FP8 weights, with 512 columns per iteration."""
    _, signature, constants, options = others.pairs_float8(gated, turns, row_scales=None, bias=None)
    del constants["x_scales"]
    constants |= {"weights": None, "FORM": form, "TALL": 128, "GROUPED": True, "ROUNDS": False, **settings}
    more = {"x": "*i32", "x_scales": "*fp32"}
    if constants.pop("with_shared", False):
        more |= {"shared": "*i32", "shared_scales": "*fp32"}
        constants = {name: value for name, value in constants.items() if name not in more}
    return pairs_float8_kernel, {**signature, **more}, constants, options


def route_with_codes():
    _, signature, constants, options = others.KERNELS["route of few rows softmax"]
    codes = {"codes": "*u8", "code_scales": "*fp32", "given": "*fp32"}
    constants = {name: value for name, value in constants.items() if name not in codes} | {"GROUP": 128}
    return route_rows_kernel, {**signature, **codes}, constants, options


KERNELS = {
    "codes of a row": pairs(CODES, True, 4),
    "codes that a row becomes": pairs(MADE, False, 2),
    "codes that a row becomes, of all its columns": pairs(MADE, False, 2, GROUPED=False, TALL=1),
    "codes of a row, and a shared expert": pairs(CODES, True, 4, with_shared=True),
    "route and codes": route_with_codes(),
}


@pytest.mark.parametrize(("name", "target"), cases(KERNELS, {pairs_float8_kernel, route_rows_kernel}))
def test_compiles(name, target):
    kernel, signature, constants, options = KERNELS[name]
    if target not in OVERLAPPING and "PAIRS" in constants:
        constants = {**constants, "PAIRS": False}
        signature = {**signature, "x": "*bf16"} if constants["FORM"] == MADE else signature
    made = compiles(target, kernel, signature, constants, options, aligned=True)
    if constants.get("PAIRS"):
        assert_four_words_a_thread(made)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", [FLOATS, CODES, MADE])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("turns", [1, 2])
def test_one_block_of_a_program_is_held_as_more_are(form, grouped, turns):
    """Triton makes an argument of 1 a constant; without the loop it could choose another layout of words."""
    kernel, signature, constants, options = pairs(form, False, turns, GROUPED=grouped and form != FLOATS, blocks=1)
    signature = {name: kind for name, kind in signature.items() if name != "blocks"}
    assert_four_words_a_thread(compiles("sm_90", kernel, signature, constants, options, aligned=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("each", [16, 32, 64, 128])  # pairs per expert
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("whole", [False, True])  # scales per block; depth a multiple of the tile's; no bias
@pytest.mark.parametrize("target", TARGETS)
def test_products_of_sorted_pairs_compile(target, each, gated, blocked, whole):
    """On Hopper with FP8 instructions and copies of whole blocks; no register is spilled."""
    native, described, (_, room) = target in FLOAT8, target in OVERLAPPING, TARGETS[target]
    tile = float8_tile(Target("cuda", target, 100, 32, room), each, gated)
    kind = "fp8e4nv" if native else "u8"
    signature = {**SORTED, "x": f"*{kind}", "codes": f"*{kind}"}
    makes = gated and blocked
    if makes:
        signature["out"] = "*u8"
    if described:
        signature["codes"] = f"tensordesc<fp8e4nv[1,{tile.block_n},128]>"
        signature |= {} if gated else {"x": f"tensordesc<fp8e4nv[{tile.block_m},128]>"}
    constants = {
        "TOP_K": 8, "GATED": gated, "ACT": int(Activation.SILU), "EXPERTS": 128, "BLOCKED": blocked,
        "WHOLE": blocked and whole, "THEN": 1 if makes else 0, "FLOAT": tl.bfloat16, "DESCRIBED": described,
        "EVEN": whole, "NATIVE": native, "ROUNDS": native and target != "gfx950", "KIND": E4M3,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "LEFT": tile.block_m >= LEAST_LEFT, "LEAST": tile.least,
        "OVERLAP": True,
        **({"bias": None, "weights": None} if whole else {}),
    }  # fmt: skip
    stages = tile.stages if target not in SMALL else 1
    options = {"num_warps": tile.warps, "num_stages": stages}
    made = compiles(target, float8_experts_kernel, signature, constants, options, aligned=True)
    if target == "sm_90":
        assert re.search(r"wgmma.mma_async.sync.aligned.m64n\d+k32.f32.e4m3.e4m3", made.asm["ptx"])
        assert "cp.async.bulk.tensor" in made.asm["ptx"]
        assert "st.local" not in made.asm["ptx"]
