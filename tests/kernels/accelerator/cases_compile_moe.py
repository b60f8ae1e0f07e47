"""Kernels of experts compile for every target, in the tiles of Qwen3-30B-A3B and of Mixtral."""

import pytest
import triton  # noqa: F401  (before any kernel file, so that they take it)

from engine.kernels.moe.combine import BLOCK, combine_kernel
from engine.kernels.moe.grouped import grouped_kernel, tile_of
from engine.kernels.moe.route import BLOCK_K, BLOCK_M, BLOCK_N, route_kernel
from engine.kernels.moe.sort import BLOCK as PAIRS
from engine.kernels.moe.sort import sort_kernel
from engine.kernels.target import Target
from tests.kernels.accelerator.targets import TARGETS, cases, compiles

T = "*bf16"
ROUTE = {
    "chosen": "*i32", "weights": "*fp32", "logits": "*fp32", "arrived": "*i32", "x": T, "router": T,
    "bias": T, "correction": "*fp32", "rows": "i32", "experts": "i32", "depth": "i32", "eps": "fp32",
    "least_sum": "fp32", "scale": "fp32",
}  # fmt: skip
GROUPED = {
    "out": T, "x": T, "weight": T, "bias": T, "order": "*i32", "ends": "*i32", "pairs": "i32", "experts": "i32",
    "width": "i32", "depth": "i32",
}  # fmt: skip
COMBINE = {
    "out": T, "gained": T, "counted": "*fp32", "made": T, "weights": "*fp32", "shared": T, "gate": T, "residual": T,
    "gain": "*fp32", "width": "i32",
}  # fmt: skip
KERNELS = {
    **{
        f"route {name}": (
            route_kernel,
            {**ROUTE, "router": router},
            {"SIGMOID": sigmoid, "TOP_K": 8, "RENORMALISE": True, "GROUPS": groups, "KEPT": kept, "SIZE": 256 // groups,
             "TWO": True, "COLUMNS": 256, "SLOTS": 8, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K,
             "OVERLAP": True, **rest},
            {"num_warps": 4, "num_stages": 3},
        )
        for name, sigmoid, groups, kept, router, rest in (
            ("softmax", False, 1, 1, T, {"bias": None, "correction": None}), ("groups", True, 8, 4, T, {}),
            ("float32", True, 1, 1, "*fp32", {}),
        )
    },
    "sort": (
        sort_kernel, {"order": "*i32", "ends": "*i32", "chosen": "*i32", "pairs": "i32"},
        {"BLOCK": PAIRS, "OVERLAP": True}, {"num_warps": 4},
    ),
    **{
        f"combine {name}": (
            combine_kernel, COMBINE, {"TOP_K": 8, "AFTER": after, "BLOCK": BLOCK, "OVERLAP": True, **rest},
            {"num_warps": 4},
        )
        for name, after, rest in (
            ("alone", False, {"shared": None, "gate": None, "residual": None}), ("whole", True, {}),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])


# The short runs take a pair of each value; the others are marked full.
@pytest.mark.covering(1)
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("each", [0, 16, 32, 64, 128])  # pairs of an expert; 0: not sorted
@pytest.mark.parametrize("gated", [False, True])
def test_grouped_products_compile(target, each, gated):
    device, shared = TARGETS[target]
    described = Target("cuda" if device.backend == "cuda" else "hip", target, 100, device.warp_size, shared)
    experts = 128
    tile = tile_of(described, each * experts, experts, gated, 2)
    constants = {"TOP_K": 8, "SORTED": each > 0, "GATHER": gated, "GATED": gated, "ACT": 0, "EXPERTS": experts,
                 "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN": True,
                 "OVERLAP": True, "bias": None}  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiles(target, grouped_kernel, GROUPED, constants, options, aligned=True)
    if target == "sm_90":
        assert "st.local" not in made.asm["ptx"]
        assert ("wgmma" in made.asm["ptx"]) == (tile.block_n >= 64)
