"""Each Triton kernel compiles for every supported target, without such a card, and fits into its shared memory."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.activation import Activation, point_kernel
from engine.kernels.attention.decode import MERGED, PREFETCH, decode_kernel
from engine.kernels.attention.dense import dense_kernel
from engine.kernels.attention.prefill import prefill_kernel
from engine.kernels.attention.tiles import KEYS
from engine.kernels.attention.work import MIN_PART, work_kernel
from engine.kernels.gate import gate_kernel
from engine.kernels.norm import norm_kernel
from engine.kernels.projection_norm import projection_norm_kernel
from engine.kernels.rotate import qkv_kernel
from engine.kernels.xielu import xielu_kernel
from tests.kernels.accelerator.targets import cases, compiles, in_float16

T = "*bf16"
ATTEND = {
    "q": T,
    "k_cache": T,
    "v_cache": T,
    "block_tables": "*i32",
    "sinks": "*fp32",
    "max_blocks": "i32",
    "block_stride": "i32",
    "scale": "fp32",
    "bend": "fp32",
    "scale_stride": "i32",
}
NO_CODES = {"k_scale": None, "v_scale": None, "CODES": 0, "MADE": False}
SHAPE = {
    **NO_CODES,
    "GROUP": 4,
    "HEAD_DIM": 128,
    "BLOCK_SIZE": 16,
    "WINDOW": 0,
    "SOFTCAP": False,
    "BLOCK_D": 128,
    "WIDE": False,
    "OVERLAP": True,
}
NO_SINKS = {"sinks": None}  # in place of the pointer above; gpt-oss, which has sinks, has heads of 64
DENSE = {
    "out": T, "q": T, "k": T, "v": T, "bounds": "*i32", "num_rows": "i32", "num_segments": "i32", "halvings": "i32",
    "scale": "fp32", "out_stride": "i32", "q_stride": "i32", "q_head": "i32", "k_stride": "i32", "k_head": "i32",
    "v_stride": "i32", "v_head": "i32",
}  # fmt: skip
NORM = {
    "out": T, "x": T, "weight": "*fp32", "bias": "*fp32", "residual": T, "width": "i32", "x_stride": "i32",
    "eps": "fp32", "offset": "fp32",
}  # fmt: skip
PARTS = {"sums": "*fp32", "stats": "*fp32", "arrived": "*i32", "parts": "*i32", "num_parts": "*i32"}
KERNELS = {
    "rms_norm": (
        norm_kernel,
        NORM,
        {"BIAS": False, "ADD": False, "CENTRE": False, "BLOCK": 4096, "OVERLAP": True},
        {"num_warps": 8},
    ),
    **{
        f"layer_norm{' of a sum' * add}": (
            norm_kernel,
            NORM,
            {"BIAS": True, "ADD": add, "CENTRE": True, "BLOCK": 2048, "OVERLAP": True},
            {"num_warps": 4},
        )
        for add in (False, True)
    },
    **{
        f"point {act.name} gated {gated}": (
            point_kernel, {"out": T, "x": T, "width": "i32"},
            {"ACT": int(act), "GATED": gated, "BLOCK": 1024, "OVERLAP": True}, {"num_warps": 4},
        )
        for act, gated in (
            *((act, True) for act in list(Activation)[:3]), (Activation.GELU, False), (Activation.GELU_TANH, False),
            (Activation.RELU2, False), (Activation.QUICK_GELU, False),
        )
    },
    "gate": (
        gate_kernel, {"values": T, "gates": T, "width": "i32", "stride": "i32"}, {"BLOCK": 1024, "OVERLAP": True},
        {"num_warps": 4},
    ),
    "projection_norm": (
        projection_norm_kernel,
        {"qkv": T, "q_weight": "*fp32", "k_weight": "*fp32", "stride": "i32", "q_width": "i32", "q_group": "i32",
         "k_group": "i32", "eps": "fp32"},
        {"CENTRE": True, "BLOCK": 8192, "OVERLAP": True},
        {"num_warps": 16},
    ),
    "xielu": (
        xielu_kernel, {"out": T, "x": T, "slopes": "*fp32", "num_values": "i32"}, {"BLOCK": 1024, "OVERLAP": True},
        {"num_warps": 4},
    ),
    **{
        f"qkv {dim} {half}": (
            qkv_kernel,
            {"q_out": T, "k_cache": T, "v_cache": T, "qkv": T, "cos": "*fp32", "sin": "*fp32", "q_norm": "*fp32",
             "k_norm": "*fp32", "slot_mapping": "*i64", "qkv_stride": "i32", "block_stride": "i32", "num_heads": "i32",
             "num_kv_heads": "i32", "block_size": "i32", "num_slots": "i32", "eps": "fp32", "scale_stride": "i32"},
            {**NO_CODES, "HEAD_DIM": dim, "HALF": half, "NORM": True, "LATE": late, "STORE": True, "HEADS": 8,
             "BLOCK": block, "REST": rest, "OVERLAP": True},
            {"num_warps": 1},
        )
        for dim, half, block, rest, late in (
            (64, 32, 32, 0, False), (80, 20, 32, 64, False), (96, 48, 64, 0, True), (128, 64, 64, 0, False),
            (256, 128, 128, 0, False),
        )
    },
    **{
        f"decode {dim} prefetched {prefetched} stripes of {stripe}": (
            decode_kernel,
            {"out": T, **PARTS, **ATTEND},
            {**SHAPE, "HEAD_DIM": dim, "BLOCK_D": block_d, "BLOCK_M": 16, "BLOCK_N": 32, "STRIPE": stripe,
             "BLOCK_G": 4 * stripe, "AT_ONCE": max(1, MERGED * warps // (4 * stripe * block_d)), "GATHER": 0,
             "STAGES": stages, "PREFETCH": prefetched, "WHOLE": False, "LANES": 32 * warps, "LEAD": lead, **sinks},
            {"num_warps": warps, "num_stages": stages},
        )
        for dim, block_d, warps, stages, prefetched, lead, stripe, sinks in (
            (64, 64, 1, 3, PREFETCH, 3, 1, {}), (128, 128, 1, 4, PREFETCH, 0, 1, NO_SINKS),
            (128, 128, 1, 3, 0, 3, 1, NO_SINKS), (256, 256, 4, 2, PREFETCH, 5, 1, NO_SINKS),
            (128, 128, 1, 4, PREFETCH, 5, 4, NO_SINKS),
        )
    },
    **{
        f"prefill {dim}": (
            prefill_kernel,
            {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
            {**SHAPE, "HEAD_DIM": dim, "BLOCK_D": block_d, "BLOCK_M": 128, "BLOCK_N": block_n, "STAGES": 2,
             "MATERIALISE": True, "FOLD": False, "FIRST": 0, **sinks, "last_keys": None},
            {"num_warps": 8, "num_stages": 2},
        )
        for dim, block_d, block_n, sinks in (
            (64, 64, 64, {}), (80, 128, 64, NO_SINKS), (128, 128, 64, NO_SINKS), (256, 256, 32, NO_SINKS)
        )
    },
    **{
        f"dense {dim}": (
            dense_kernel,
            DENSE,
            {"CAUSAL": False, "WINDOW": 0 if short else 65, "SHORT": short, "GROUP": 1, "HEAD_DIM": dim,
             "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": 64, "REST": rest,
             "WIDE": False, "STAGES": 2, "MATERIALISE": True, "OVERLAP": True, "bias": None, "REACH": 0, "UNIT": 8},
            {"num_warps": block_m // 16, "num_stages": 2},
        )
        for dim, block_m, block_n, rest, short in (
            (80, 128, 64, 16, False), (72, 128, 64, 16, False), (64, 64, 64, 0, True)
        )
    },
    "work": (
        work_kernel,
        {"parts": "*i32", "num_parts": "*i32", "tiles": "*i32", "num_tiles": "*i32",
         "large_tiles": "*i32", "num_large_tiles": "*i32", "query_start": "*i32", "context_len": "*i32",
         "table_row": "*i32", "num_rows": "i32", "aim": "i32", "first_key": "i32"},
        {"MOST": 4, "WHOLE": False, "STRIPE": 4, "STEP": MIN_PART, "KEYS": KEYS, "TILE": 32, "LARGE_TILE": 64,
         "ROWS": 256, "large_tiles": None, "num_large_tiles": None},
        {"num_warps": 4},
    ),
}  # fmt: skip
KERNELS |= in_float16(KERNELS, "layer_norm", "point GELU gated False", "qkv 64 32", "dense 64")


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
