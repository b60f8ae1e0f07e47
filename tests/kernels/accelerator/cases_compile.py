"""Each Triton kernel compiles for every target we promise, without such a card, and fits its shared memory."""

import pytest
import triton  # noqa: F401  (before any kernel file, so that they take it)

from engine.kernels.activation import point_kernel
from engine.kernels.attention.attend import attend_kernel
from engine.kernels.attention.merge import merge_kernel
from engine.kernels.attention.work import MIN_PART, work_kernel
from engine.kernels.norm import norm_kernel
from engine.kernels.qkv import qkv_kernel
from tests.kernels.accelerator.targets import TARGETS, compiles

T = "*bf16"
ATTEND = {
    "q": T, "k_cache": T, "v_cache": T, "query_start": "*i32", "context_len": "*i32", "block_tables": "*i32",
    "items": "*i32", "num_items": "*i32", "max_blocks": "i32", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
SHAPE = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFTCAP": False, "BLOCK_N": 64, "BLOCK_D": 128}
KERNELS = {
    "rms_norm": (
        norm_kernel,
        {"out": T, "residual": T, "x": T, "weight": "*fp32", "bias": "*fp32", "width": "i32", "x_stride": "i32",
         "eps": "fp32", "offset": "fp32"},
        {"ADD": True, "BIAS": False, "CENTRE": False, "BLOCK": 4096},
        {"num_warps": 8},
    ),
    "layer_norm": (
        norm_kernel,
        {"out": T, "residual": T, "x": T, "weight": "*fp32", "bias": "*fp32", "width": "i32", "x_stride": "i32",
         "eps": "fp32", "offset": "fp32"},
        {"ADD": False, "BIAS": True, "CENTRE": True, "BLOCK": 2048},
        {"num_warps": 4},
    ),
    **{
        f"point {op}": (point_kernel, {"out": T, "x": T, "width": "i32"}, {"OP": op, "BLOCK": 1024}, {"num_warps": 4})
        for op in range(4)
    },
    "qkv": (
        qkv_kernel,
        {"q_out": T, "k_cache": T, "v_cache": T, "qkv": T, "cos": "*fp32", "sin": "*fp32", "q_norm": "*fp32",
         "k_norm": "*fp32", "slot_mapping": "*i64", "qkv_stride": "i32", "num_heads": "i32", "num_kv_heads": "i32",
         "block_size": "i32", "eps": "fp32"},
        {"HEAD_DIM": 128, "HALF": 64, "NORM": True, "STORE": True, "BLOCK": 64, "REST": 1},
        {"num_warps": 1},
    ),
    "decode": (
        attend_kernel, {"out": "*fp32", "stats": "*fp32", **ATTEND}, {**SHAPE, "SPLIT": True, "BLOCK_M": 16},
        {"num_warps": 4, "num_stages": 2},
    ),
    "prefill": (
        attend_kernel, {"out": T, "stats": T, **ATTEND}, {**SHAPE, "SPLIT": False, "BLOCK_M": 128},
        {"num_warps": 8, "num_stages": 2},
    ),
    "merge": (
        merge_kernel,
        {"out": T, "sums": "*fp32", "stats": "*fp32", "token_of": "*i32", "first_item": "*i32"},
        {"HEAD_DIM": 128, "BLOCK_D": 128},
        {"num_warps": 2},
    ),
    "work": (
        work_kernel,
        {"parts": "*i32", "num_parts": "*i32", "first_part": "*i32", "token_of": "*i32", "tiles": "*i32",
         "num_tiles": "*i32", "query_start": "*i32", "context_len": "*i32", "table_row": "*i32",
         "num_rows": "i32", "aim": "i32"},
        {"SINGLE": 1, "STEP": MIN_PART, "TILE": 32, "ROWS": 256},
        {"num_warps": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
