"""Kernels of adapters compile for every target, with the widths of an 8B model."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.lora.expand import BLOCK_N, expand_kernel, lows_of
from engine.kernels.lora.expand_gated import expand_gated_kernel
from engine.kernels.lora.expand_summed import expand_summed_kernel
from engine.kernels.lora.rows import BLOCK, pair_keys_kernel, place_list_kernel
from engine.kernels.lora.shrink import columns_of, shrink_kernel
from tests.kernels.accelerator.targets import cases, compiles

T = "*bf16"
LIST = {
    "order": "*i32", "tiles": "*i32", "numbers": "*i32", "rows": "i32", "num_tiles": "i32", "places": "i32",
    "tile": "i32",
}  # fmt: skip
SHRINK = {
    "low": "*fp32", "x": T, "values": T, "words": "*i64", "order": "*i32", "tiles": "*i32", "rows": "i32",
    "depth": "i32", "part_len": "i32", "experts": "i32", "top_k": "i32",
    "sites": "i32", "site": "i32", "x_stride": "i32", "place_len": "i32",
}  # fmt: skip
OF_PLACES = {
    "low": "*fp32", "values": T, "words": "*i64", "order": "*i32", "tiles": "*i32", "squares": "*fp32", "rows": "i32",
    "parts": "i32", "pieces": "i32", "depth": "i32", "width": "i32", "experts": "i32", "sites": "i32", "site": "i32",
    "place_len": "i32", "square_parts": "i32", "eps": "fp32", "next_low": "*fp32", "next_site": "i32",
}  # fmt: skip
SUMMED = {
    "out": T, "gained": T, "counted": "*fp32", "next_low": "*fp32", "made": T, "low": "*fp32", "values": T,
    "words": "*i64", "numbers": "*i32", "chosen": "*i32", "weights": "*fp32", "residual": T, "gain": "*fp32",
    "count": "*i32", "rows": "i32", "parts": "i32", "depth": "i32", "width": "i32", "experts": "i32", "sites": "i32",
    "site": "i32", "place_len": "i32", "next_site": "i32",
}  # fmt: skip
EXPAND = {
    **OF_PLACES, "y": T, "gained": T, "counted": "*fp32", "blocks": "*i32", "gain": "*fp32",
}  # fmt: skip
GATED = {**OF_PLACES, "out": T, "halves": T}
KEYS = {
    "keys": "*i32", "numbers": "*i32", "chosen": "*i32", "pairs": "i32", "experts": "i32",
    "top_k": "i32",
}  # fmt: skip


def blocks(tile, next_low=0, rank=16):
    return {
        "BLOCK_N": BLOCK_N,
        "LOWS": lows_of(16, tile, rank),
        "NEXT": next_low,
        "LINES": max(1, 2 * rank * bool(next_low)),
    }


def shrinks(tile, rank):
    return {"BLOCK_K": columns_of(tile, rank), "ONCE": tile == 1, "SETTLED": rank != 32, "DURING": False}


KERNELS = {
    "keys of pairs": (pair_keys_kernel, KEYS, {"BLOCK": BLOCK, "OVERLAP": True}, {"num_warps": 4}),
    **{
        f"place list{', single rows' if single else ''}": (
            place_list_kernel, LIST, {"BLOCK": BLOCK, "SINGLE": single, "OVERLAP": True}, {"num_warps": 4},
        )
        for single in (False, True)
    },
    **{
        f"{name} {tile} x {rank}": (
            kernel, signature, {"TILE": tile, "RANK": rank, "EACH": 4 * (rank == 32), **constants, "OVERLAP": True},
            {"num_warps": 4, "num_stages": stages},
        )
        for tile, rank in ((1, 16), (1, 32), (16, 16), (64, 64))
        for name, kernel, signature, constants, stages in (
            ("shrink", shrink_kernel, SHRINK, shrinks(tile, rank), 3),
            ("expand", expand_kernel, EXPAND, {**blocks(tile), "AFTER": False, "PARTS": 0}, 2),
            ("expand between norms", expand_kernel, EXPAND, {**blocks(tile), "AFTER": True, "PARTS": 64}, 2),
            ("expand gated", expand_gated_kernel, GATED, {**blocks(tile), "ACT": 0, "PARTS": 64}, 2),
        )
    },
    **{
        f"{name}, then the next layer's A x": (
            kernel, signature, {"TILE": 1, "RANK": 32, "EACH": 0, **constants, "OVERLAP": True},
            {"num_warps": 4, "num_stages": 2},
        )
        for name, kernel, signature, constants in (
            ("expand", expand_kernel, EXPAND, {**blocks(1, 2, 32), "AFTER": True, "PARTS": 0}),
            ("expand gated", expand_gated_kernel, GATED, {**blocks(1, 1, 32), "ACT": 0, "PARTS": 0}),
        )
    },
    "shrink during the layer's own product": (
        shrink_kernel, SHRINK,
        {"TILE": 1, "RANK": 32, "EACH": 4, **shrinks(1, 32), "DURING": True, "OVERLAP": True},
        {"num_warps": 4, "num_stages": 3},
    ),
    "expand and sum of experts": (
        expand_summed_kernel, SUMMED,
        {"TOP_K": 4, "SLOTS": 4, "RANK": 32, "BLOCK_N": BLOCK_N, "LOWS": 1, "AFTER": True, "NEXT": 3, "LINES": 128,
         "shared": None, "gate": None, "OVERLAP": True}, {"num_warps": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_a_kernel_compiles(name, target):
    kernel, signature, constants, options = KERNELS[name]
    compiles(target, kernel, signature, constants, options)
