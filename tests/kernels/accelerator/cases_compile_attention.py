"""Attention kernels for less common models: heads of 80 and 96, windows, caps, huge caches."""

import re

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.attention.decode import MERGED, PREFETCH, decode_kernel
from engine.kernels.attention.dense import dense_kernel
from engine.kernels.attention.disentangled import disentangled_kernel
from engine.kernels.attention.prefill import prefill_kernel
from engine.kernels.convolution import convolution_kernel
from tests.kernels.accelerator.cases_compile import ATTEND, DENSE, NO_SINKS, PARTS, SHAPE, T
from tests.kernels.accelerator.targets import cases, compiles

BENT = {"WINDOW": 1024, "SOFTCAP": True, "WIDE": True}
CASES = {
    "80": {"HEAD_DIM": 80, **NO_SINKS},
    "96": {"HEAD_DIM": 96},
    "128 in a window, capped, wide": {**BENT, **NO_SINKS},
}
KERNELS = {
    **{
        f"decode {name}": (
            decode_kernel,
            {"out": T, **PARTS, **ATTEND},
            {**SHAPE, "STRIPE": 1, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_G": 4, "AT_ONCE": MERGED // (4 * 128),
             "GATHER": 0, "STAGES": 3, "PREFETCH": PREFETCH, "WHOLE": False, "LANES": 32, "LEAD": 5, **case},
            {"num_warps": 1, "num_stages": 3},
        )
        for name, case in CASES.items()
    },
    **{
        f"prefill {name}": (
            prefill_kernel,
            {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
            {**SHAPE, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "MATERIALISE": True, "FOLD": False, "FIRST": 0,
             "last_keys": None, **case},
            {"num_warps": 8, "num_stages": 2},
        )
        for name, case in CASES.items()
        if name != "80"  # head size 80 is tested with the other kernels
    },
    **{
        f"prefill of tokens that see later ones, window {window}": (
            prefill_kernel,
            {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
            {**SHAPE, "HEAD_DIM": 256, "BLOCK_D": 256, "BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2, "MATERIALISE": True,
             "FOLD": False, "FIRST": 0, "WINDOW": window, **NO_SINKS},
            {"num_warps": 8, "num_stages": 2},
        )
        for window in (0, 1024)
    },
    "decode 512": (
        decode_kernel,
        {"out": T, **PARTS, **ATTEND},
        {**SHAPE, "STRIPE": 1, "HEAD_DIM": 512, "BLOCK_D": 512, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_G": 8,
         "AT_ONCE": 1, "GATHER": 0, "STAGES": 1, "PREFETCH": 0, "WHOLE": False, "LANES": 128, "LEAD": 0, **NO_SINKS},
        {"num_warps": 4, "num_stages": 1},
    ),
    "prefill 512": (
        prefill_kernel,
        {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
        {**SHAPE, "HEAD_DIM": 512, "BLOCK_D": 512, "BLOCK_M": 64, "BLOCK_N": 16, "STAGES": 2, "MATERIALISE": True,
         "FOLD": False, "FIRST": 0, "last_keys": None, **NO_SINKS},
        {"num_warps": 8, "num_stages": 2},
    ),
    "prefill of chunks": (
        prefill_kernel,
        {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
        {**SHAPE, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "MATERIALISE": True, "FOLD": False, "FIRST": 0,
         "last_keys": None, "WINDOW": -8192, **NO_SINKS},
        {"num_warps": 8, "num_stages": 2},
    ),
    "decode of whole rows": (
        decode_kernel,
        {"out": T, **PARTS, **ATTEND},
        {**SHAPE, "STRIPE": 4, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_G": 16, "AT_ONCE": MERGED // (16 * 128),
         "GATHER": 0, "STAGES": 4, "PREFETCH": PREFETCH, "WHOLE": True, "LANES": 32, "LEAD": 5, **NO_SINKS},
        {"num_warps": 1, "num_stages": 4},
    ),
    "prefill without the first key": (
        prefill_kernel,
        {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND},
        {**SHAPE, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "MATERIALISE": True, "FOLD": False, "FIRST": 1,
         "last_keys": None, **NO_SINKS},
        {"num_warps": 8, "num_stages": 2},
    ),
    "dense with a bias by distance": (
        dense_kernel,
        {**DENSE, "bias": "*fp32"},
        {"CAUSAL": False, "WINDOW": 0, "SHORT": False, "GROUP": 1, "HEAD_DIM": 64, "BLOCK_M": 128, "BLOCK_N": 64,
         "BLOCK_D": 64, "REST": 0, "WIDE": False, "STAGES": 2, "MATERIALISE": True, "OVERLAP": True, "REACH": 128,
         "UNIT": 8},
        {"num_warps": 8, "num_stages": 2},
    ),
    **{
        f"convolution, bias {bias}": (
            convolution_kernel,
            {"out": T, "projected": T, "cache": T, "taps": "*fp32", "bias": "*fp32", "query_start": "*i32",
             "context_len": "*i32", "table_row": "*i32", "block_tables": "*i32", "slot_mapping": "*i64",
             "num_rows": "i32", "width": "i32", "max_blocks": "i32", "block_stride": "i32"},
            {**({} if bias else {"bias": None}), "BLOCK_SIZE": 16, "TAPS": 3, "STEPS": 8, "TOKENS": tokens,
             "COLUMNS": 256, "OVERLAP": True},
            {"num_warps": 4},
        )
        for bias, tokens in ((False, 1), (True, 8))
    },
    "disentangled": (
        disentangled_kernel,
        {**{name: kind for name, kind in DENSE.items() if name != "bias"}, "pos_k": T, "pos_q": T, "buckets": "*i32",
         "reach": "i32"},
        {"HEAD_DIM": 64, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 64, "WIDE": False,
         "MATERIALISE": True, "OVERLAP": True},
        {"num_warps": 4, "num_stages": 1},
    ),
    **{
        f"dense {dim}": (
            dense_kernel,
            DENSE,
            {"CAUSAL": True, "WINDOW": 750 if dim == 128 else 0, "SHORT": False, "GROUP": 4, "HEAD_DIM": dim,
             "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "REST": rest, "WIDE": rest > 0, "STAGES": 2,
             "MATERIALISE": True, "OVERLAP": True, "bias": None, "REACH": 0, "UNIT": 8},
            {"num_warps": block_m // 16, "num_stages": 2},
        )
        for dim, block_m, block_n, block_d, rest in (
            (96, 128, 64, 64, 32), (128, 128, 64, 128, 0), (256, 64, 32, 256, 0)
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS, (decode_kernel, prefill_kernel, dense_kernel)))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("prefetched", "lead"), [(0, 5), (PREFETCH, 0), (PREFETCH, 3)])
@pytest.mark.parametrize("name", ["decode 96", "decode 128 in a window, capped, wide"])
def test_keys_are_read_before_the_wait_and_further_ones_asked_for_where_the_launcher_says_so(name, prefetched, lead):
    kernel, signature, constants, options = KERNELS[name]
    made = compiles(
        "sm_90",
        kernel,
        signature,
        {**constants, "PREFETCH": prefetched, "LEAD": lead},
        options,
        aligned=True,
    )
    text = made.asm["ptx"]
    assert text.count("cp.async.bulk.prefetch.L2") == (2 if prefetched else 0)
    # One wait for parts that may not begin early, another in the first iteration, after the copies of its keys.
    early, late = (found.start() for found in re.finditer("griddepcontrol.wait", text))
    copies = [found.start() for found in re.finditer("cp.async.cg", text)]
    assert early < copies[0] < late
    assert text.count("griddepcontrol.launch_dependents") == 1
    assert (text.index("griddepcontrol.launch_dependents") < early) == (lead == 0)
    if prefetched:
        assert text.index("cp.async.bulk.prefetch.L2") < early
    # Loads before the wait do not use the multiprocessor's L1 cache.
    assert "ld.global.b" not in text[:early]
    assert "ld.global.cg.b32" in text[:early]
