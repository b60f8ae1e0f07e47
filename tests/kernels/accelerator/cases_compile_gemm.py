"""Products and the rotary table compile for every target."""

import pytest
import triton  # noqa: F401  (before any kernel file, so that they take it)

from engine.kernels.gemm.invariant import TOKENS, invariant_kernel, tile_of
from engine.kernels.gemm.split_k import split_kernel
from engine.kernels.rope import angle_kernel
from tests.kernels.accelerator.targets import TARGETS, compiles

T = "*bf16"
SPLIT = {
    "out": T, "partial": "*fp32", "arrived": "*i32", "x": T, "weight": T, "bias": T, "residual": T,
    "rows": "i32", "width": "i32", "depth": "i32", "x_stride": "i32", "splits": "i32", "part_len": "i32",
}  # fmt: skip
INVARIANT = {"out": T, "x": T, "weight": T, "bias": T, "residual": T, **dict.fromkeys(list(SPLIT)[7:11], "i32")}
ANGLE = {
    "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "inv_freq": "*fp32", "num_tokens": "i32", "half": "i32",
    "axis_stride": "i32", "first_end": "i32", "second_end": "i32", "scaling": "fp32",
}  # fmt: skip
KERNELS = {
    **{
        f"split {rows} gated {gated}": (
            split_kernel,
            SPLIT,
            {"BIAS": True, "RESIDUAL": not gated, "GATED": gated, "SPLIT": True, "BLOCK_M": rows, "BLOCK_N": 64,
             "BLOCK_K": 64, "EVEN": even},
            {"num_warps": 4, "num_stages": 3},
        )
        for rows, gated, even in ((16, False, True), (64, False, False), (16, True, True))
    },
    **{
        f"invariant {width}": (
            invariant_kernel,
            INVARIANT,
            {"BIAS": True, "RESIDUAL": True, "GROUP": 8, "BLOCK_M": TOKENS, "BLOCK_N": tile_of(width, 2)[0],
             "BLOCK_K": tile_of(width, 2)[1], "EVEN": True},
            {"num_warps": 4, "num_stages": tile_of(width, 2)[2]},
        )
        for width in (4096, 24576)
    },
    **{
        f"angle {three}": (angle_kernel, ANGLE, {"THREE": three, "TOKENS": 4, "BLOCK": 64}, {"num_warps": 4})
        for three in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
