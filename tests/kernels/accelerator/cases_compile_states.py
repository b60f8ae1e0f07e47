"""Kernels of state layers compile for every target, with sizes of Qwen3.5, Nemotron and Mamba."""

import pytest
import triton  # noqa: F401  (before any kernel file, so that they take it)

from engine.kernels.state.chunks import chunks_kernel
from engine.kernels.state.conv import before_kernel, conv_kernel
from engine.kernels.state.delta_channels import channel_step_kernel
from engine.kernels.state.delta_inputs import delta_inputs_kernel
from engine.kernels.state.delta_prepare import delta_prepare_kernel
from engine.kernels.state.delta_replay import delta_own_kernel
from engine.kernels.state.delta_scan import delta_carry_kernel, delta_finish_kernel
from engine.kernels.state.delta_step import delta_step_kernel
from engine.kernels.state.replay import replay_kernel
from engine.kernels.state.selective_kernel import selective_kernel, tail_kernel
from engine.kernels.state.ssd_replay import ssd_own_kernel
from engine.kernels.state.ssd_scan import ssd_carry_kernel, ssd_finish_kernel
from engine.kernels.state.ssd_step import ssd_step_kernel
from tests.kernels.accelerator.targets import cases, compiles

T, F, N = "*bf16", "*fp32", "*i32"
RUNS = dict.fromkeys(("runs", "base_run", "write_run", "tail_run"), N)
ROWS = dict.fromkeys(("base", "new_base", "start", "query_start", "checkpoint_run", "checkpoint_at"), N)
FEW = {name: kind for name, kind in ROWS.items() if name != "checkpoint_at"}
HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128}
STRIDED = "runs", "projected", "state", "key", "delta", "gate"
STRIDES = {f"{name}_stride": "i32" for name in STRIDED}
PAGES = {"states": F, "keys": T, "deltas": F, "gates": F}
PLACES = {
    "STATE_FIRST": 0, "STATE_EACH": 64, "KEY_FIRST": 0, "KEY_EACH": 8, "DELTA_FIRST": 5, "DELTA_EACH": 64,
    "GATE_FIRST": 16, "GATE_EACH": 256, "RING": 20,
}  # fmt: skip
DELTA = {"active": T, "projected": T, "a_log": F, "dt_bias": F}
OWN = {
    **dict.fromkeys(("runs", "tail_run", "base", "new_base", "start", "query_start", "replay_start"), N),
    "num_rows": "i32", "eps": "fp32", "runs_stride": "i32", "projected_stride": "i32", "page_stride": "i32",
}  # fmt: skip
KEPT = {
    "FIRST": 0, "WIDTH": 8192, "FEW_FIRST": 12288, "FEW": 64, "INPUT_PAGE": 5, "INPUT_EACH": 2, "FEW_PAGE": 0,
    "FEW_EACH": 256, "RING": 66, "STEPS": 8, "COLUMNS": 1024, "OVERLAP": True,
}  # fmt: skip
KERNELS = {
    **{
        f"conv {name}": (
            conv_kernel,
            {"active": T, "projected": T, "taps": F, "bias": bias, "pages": T, **RUNS, **FEW,
             "num_rows": "i32", "runs_stride": "i32", "projected_stride": "i32", "page_stride": "i32"},
            {"WIDTH": 8192, "TAPS": 4, "KEY_HEADS": heads, "KEY_DIM": 128, "PIECE": piece, "BLOCK": piece,
             "SCALE": 0.1, "UNIT": 1e-6, "LOW": low, "HIGH": 4096, "RING": 20, "BEFORE_FIRST": 64,
             "RING_FIRST": 17, "RING_EACH": 2, "AGAIN_FIRST": 0, "AGAIN_EACH": 8, "STEPS": 8, "TOKENS": tokens,
             "GROUP": min(4, tokens), "SHORT": not heads, "OVERLAP": True, **({} if bias else {"bias": None})},
            {"num_warps": 1},
        )
        for name, heads, piece, low, tokens, bias in (
            ("with heads", 16, 128, 2048, 16, None), ("with a bias", 0, 256, 0, 1, F)
        )
    },
    "inputs before a base": (
        before_kernel,
        {"projected": T, "pages": T, **RUNS, **ROWS, "runs_stride": "i32", "projected_stride": "i32",
         "page_stride": "i32"},
        {"WIDTH": 8192, "TAPS": 4, "RING": 20, "BEFORE_FIRST": 64, "INPUT_FIRST": 17, "INPUT_EACH": 2, "COLUMNS": 1024,
         "OVERLAP": True},
        {"num_warps": 4},
    ),
    "delta inputs": (
        delta_inputs_kernel,
        {"heads": F, "dots": F, "decays": F, "projected": T, "taps": F, "a_log": F, "dt_bias": F, "keys": T,
         "gates": F, **{name: N for name in RUNS if name != "write_run"}, **FEW,
         **{f"{name}_stride": "i32" for name in ("runs", "projected", "key", "gate")}},
        {**HEADS, "A": 12320, "TAPS": 4, "SCALE": 0.1, "UNIT": 1e-6, "RING": 20, "KEY_FIRST": 0, "KEY_EACH": 8,
         "GATE_FIRST": 16, "GATE_EACH": 256, "BEFORE_FIRST": 64, "INPUT_FIRST": 17, "INPUT_EACH": 2, "PLACES": 32,
         "LINES": 16, "BLOCK_K": 128, "BLOCK_V": 256, "AHEAD": 16, "FETCH": True, "OVERLAP": True},
        {"num_warps": 4},
    ),
    **{
        f"delta step, {'inline' if inline else 'apart'}": (
            delta_step_kernel,
            {"out": T, "heads": F, "dots": F, "decays": F, "projected": T, "norm": F, **PAGES, **RUNS, **FEW, **STRIDES,
             "eps": "fp32", "slots": "i32", "parts": "i32"},
            {**HEADS, **PLACES, "Z": 8192, "B": 12288, "SIGMOID": False, "TAPS": 4, "BEFORE_FIRST": 64,
             "INPUT_FIRST": 17, "INPUT_EACH": 2, "PLACES": 32, "LINES": 16, "PIECE": piece, "BLOCK_V": 128,
             "FOLD_C": 16, "FOLD_V": 64, "FOLD": 8, "INLINE": inline, "FETCH": 64, "AHEAD": ahead,
             "OVERLAP": True},
            {"num_warps": warps},
        )
        for inline, ahead, piece, warps in ((True, False, 16, 1), (False, True, 64, 4))
    },
    "delta step by channels": (
        channel_step_kernel,
        {"out": T, **DELTA, "norm": F, **PAGES, **RUNS, **FEW, "eps": "fp32", **STRIDES},
        {**HEADS, **PLACES, "Z": 8192, "B": 12288, "A": 12320, "SIGMOID": True, "PLACES": 32, "BLOCK_K": 128,
         "BLOCK_V": 128, "OVERLAP": True},
        {"num_warps": 8},
    ),
    "chunks": (
        chunks_kernel,
        {"chunks": N, "arrived": N, "base": N, "start": N, "query_start": N, "checkpoint_run": N},
        {"RING": 20, "SIZE": 64, "LANES": 64, "OVERLAP": True},
        {"num_warps": 1},
    ),
    "delta prepare": (
        delta_prepare_kernel,
        {"inverse": T, "mixed": T, "levels": F, "betas": F, **DELTA, "chunks": N, "num_chunks": N,
         "level_stride": "i32", "projected_stride": "i32"},
        {**HEADS, "B": 12288, "A": 12320, "BLOCK_K": 128, "PART": 16, "OVERLAP": True},
        {"num_warps": 2},
    ),
    "delta carry": (
        delta_carry_kernel,
        {"out": T, "inverse": T, "mixed": T, "levels": F, "betas": F, "active": T, **PAGES, **RUNS, **ROWS,
         "level_stride": "i32", **{name: "i32" for name in STRIDES if name != "projected_stride"}},
        {**HEADS, **PLACES, "PLACES": 32, "BLOCK_K": 128, "BLOCK_V": 32, "SIZE": 64, "STAGES": 1,
         "OVERLAP": True},
        {"num_warps": 8},
    ),
    "delta carry of a replay": (
        delta_carry_kernel,
        {"out": T, "inverse": T, "mixed": T, "levels": F, "betas": F, "active": T, **PAGES, **RUNS, **ROWS,
         "level_stride": "i32", **{name: "i32" for name in STRIDES if name != "projected_stride"}},
        {**HEADS, **PLACES, "RING": 0, "PLACES": 16, "BLOCK_K": 128, "BLOCK_V": 32, "SIZE": 64, "STAGES": 1,
         "OVERLAP": True},
        {"num_warps": 8},
    ),
    "replay": (
        replay_kernel,
        {"given": T, "projected": T, "pages": T,
         **{name: kind for name, kind in OWN.items() if name not in ("new_base", "eps")}},
        {**KEPT, "POSITIONS": 8},
        {"num_warps": 4},
    ),
    "delta own tokens": (
        delta_own_kernel,
        {"out": T, "made": T, "projected": T, "norm": F, "pages": T, **OWN},
        {**KEPT, "VALUE_HEADS": 32, "VALUE_DIM": 128, "Z": 8192, "SIGMOID": False, "PARTS": 4, "HEADS": 8,
         "BLOCK_V": 128},
        {"num_warps": 4},
    ),
    "delta finish": (
        delta_finish_kernel,
        {"out": T, **DELTA, "norm": F, "keys": T, "gates": F, "runs": N, "tail_run": N, **FEW, "chunks": N,
         "num_chunks": N, "eps": "fp32", "runs_stride": "i32", "projected_stride": "i32", "key_stride": "i32",
         "gate_stride": "i32"},
        {**HEADS, "Z": 8192, "A": 12320, "SIGMOID": False, "RING": 20, "KEY_FIRST": 0, "KEY_EACH": 8, "GATE_FIRST": 16,
         "GATE_EACH": 256, "INPUT_FIRST": 17, "INPUT_EACH": 2, "TOKENS": 16, "BLOCK_V": 128, "BLOCK_H": 32,
         "COLUMNS": 1024, "OVERLAP": True},
        {"num_warps": 4},
    ),
}  # fmt: skip
GROUPS = {"HEADS": 64, "HEAD_DIM": 64, "GROUPS": 8, "STATE": 128, "RING": 20}
SSD = {
    "STATE_FIRST": 0, "STATE_EACH": 128, "AGAIN_FIRST": 0, "AGAIN_EACH": 3, "STEP_FIRST": 7, "STEP_EACH": 128,
    "PLACES": 32, "BLOCK_N": 128, "OVERLAP": True,
}  # fmt: skip
SSD_PAGES = {"states": F, "again": T, "steps": F}
SSD_STRIDES = {f"{name}_stride": "i32" for name in ("runs", "projected", "state", "again", "step")}
SSM = {"active": T, "projected": T, "a_log": F, "dt_bias": F, "skip": F}
KERNELS |= {
    "ssd step": (
        ssd_step_kernel,
        {"out": T, "arrived": N, **SSM, "norm": F, **SSD_PAGES, **RUNS, **FEW, "eps": "fp32", **SSD_STRIDES},
        {**GROUPS, **SSD, "ORDER": 2, "BLOCK_P": 64, "BLOCK_G": 512},
        {"num_warps": 4},
    ),
    "ssd carry": (
        ssd_carry_kernel,
        {"out": T, **SSM, **SSD_PAGES, **RUNS, **ROWS, **SSD_STRIDES},
        {**GROUPS, **SSD, "TIMES": 10240, "BLOCK_P": 16, "SIZE": 64},
        {"num_warps": 2, "num_stages": 1},
    ),
    "ssd carry of a replay": (
        ssd_carry_kernel,
        {"out": T, **SSM, **SSD_PAGES, **RUNS, **ROWS, **SSD_STRIDES},
        {**GROUPS, **SSD, "RING": 0, "TIMES": 6144, "PLACES": 16, "BLOCK_P": 16, "SIZE": 64},
        {"num_warps": 2, "num_stages": 1},
    ),
    "ssd own tokens": (
        ssd_own_kernel,
        {"out": T, "made": T, "projected": T, "norm": F, "pages": T, **OWN},
        {**KEPT, "INNER": 4096, "GROUPS": 8, "ORDER": 2, "BLOCK_G": 512},
        {"num_warps": 4},
    ),
    "ssd finish": (
        ssd_finish_kernel,
        {"out": T, "active": T, "projected": T, "dt_bias": F, "norm": F, "again": T, "steps": F, "runs": N,
         "tail_run": N, "new_base": N, "start": N, "query_start": N, "chunks": N, "num_chunks": N, "eps": "fp32",
         "runs_stride": "i32", "projected_stride": "i32", "again_stride": "i32", "step_stride": "i32"},
        {**GROUPS, "ORDER": 2, "AGAIN_FIRST": 0, "AGAIN_EACH": 3, "STEP_FIRST": 7, "STEP_EACH": 128, "INPUT_FIRST": 8,
         "INPUT_EACH": 2, "BLOCK_G": 512, "BLOCK_H": 64, "COLUMNS": 1024, "OVERLAP": True},
        {"num_warps": 4},
    ),
    "selective": (
        selective_kernel,
        {"out": T, "x": T, "steps": T, "b": T, "c": T, "z": T, "inputs": T, "a_log": F, "dt_bias": F, "skip": F,
         "states": F, "pages": T, **RUNS, **ROWS, "runs_stride": "i32", "mixed_stride": "i32",
         "projected_stride": "i32", "state_stride": "i32", "page_stride": "i32"},
        {"INNER": 8192, "STATE": 16, "RING": 20, "STATE_FIRST": 0, "STATE_EACH": 512, "X_FIRST": 0, "X_EACH": 2,
         "EVERY": 16, "STEP_FIRST": 10, "B_FIRST": 20, "B_EACH": 1024, "INPUT_FIRST": 21, "BLOCK_D": 64, "BLOCK_N": 16,
         "OVERLAP": True},
        {"num_warps": 4},
    ),
    "selective tail": (
        tail_kernel,
        {"b": T, "pages": T, "runs": N, "tail_run": N, **FEW, "runs_stride": "i32", "mixed_stride": "i32",
         "page_stride": "i32"},
        {"STATE": 16, "RING": 20, "B_FIRST": 20, "B_EACH": 1024, "BLOCK_N": 16, "OVERLAP": True},
        {"num_warps": 1},
    ),
}  # fmt: skip


# `make test` compiles each form for one target; all targets take a minute and a half.
@pytest.mark.parametrize(("name", "target"), cases(KERNELS, {kernel for kernel, *_ in KERNELS.values()}))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
