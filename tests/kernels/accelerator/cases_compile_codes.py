"""Store and attention with an 8-bit cache compile for targets with FP8 units and without."""

import re

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.attention.decode import MERGED, PREFETCH, decode_kernel
from engine.kernels.attention.prefill import prefill_kernel
from engine.kernels.attention.tiles import KEYS, LARGE
from engine.kernels.attention.work import MIN_PART, work_kernel
from engine.kernels.float8 import E4M3, E4M3_UNITS, E5M2, E5M2_BYTES
from engine.kernels.rotate import qkv_kernel
from tests.kernels.accelerator.cases_compile import ATTEND, NO_SINKS, PARTS, SHAPE, T
from tests.kernels.accelerator.targets import OVERLAPPING, TARGETS, compiles

CODES = {"k_cache": "*u8", "v_cache": "*u8"}
PAIRS = {"k_cache": "*i16", "v_cache": "*i16"}
SCALES = {"k_scale": "*fp32", "v_scale": "*fp32"}
FORMS = {
    "e4m3 made": {"CODES": E4M3, "MADE": True},
    "e4m3 given": {"CODES": E4M3, "MADE": False},
    "e5m2": {"CODES": E5M2, "MADE": False, "k_scale": None, "v_scale": None},
    "e4m3 by the units": {"CODES": E4M3_UNITS, "MADE": True},
    "e5m2 by bytes": {"CODES": E5M2_BYTES, "MADE": False, "k_scale": None, "v_scale": None},
}
PLAIN = {name: value for name, value in SHAPE.items() if name not in ("k_scale", "v_scale", "CODES", "MADE")}
KERNELS = {
    **{
        f"decode {name}{', stripes' * (stripe > 1)}": (
            decode_kernel,
            {"out": T, **PARTS, **ATTEND, **PAIRS, **SCALES},
            {**PLAIN, "BLOCK_M": 16, "BLOCK_N": 32, "STRIPE": stripe, "BLOCK_G": 4 * stripe,
             "AT_ONCE": MERGED // (4 * stripe * 128), "GATHER": 16, "STAGES": 4,
             "PREFETCH": PREFETCH, "WHOLE": False, "LANES": 32, "LEAD": 5, **NO_SINKS, **form},
            {"num_warps": 1, "num_stages": 4},
        )
        for name, form in FORMS.items()
        for stripe in ((1, 4) if name == "e4m3 made" else (1,))
    },
    **{
        f"prefill {name}": (
            prefill_kernel,
            {"out": T, "last_keys": "*i32", "tiles": "*i32", "num_tiles": "*i32", **ATTEND, **CODES, **SCALES},
            {**PLAIN, "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "MATERIALISE": True, "last_keys": None,
             "FIRST": 0, **NO_SINKS, **form},
            {"num_warps": 8, "num_stages": 2},
        )
        for name, form in FORMS.items()
    },
    "work, large tiles": (
        work_kernel,
        {"parts": "*i32", "num_parts": "*i32", "tiles": "*i32", "num_tiles": "*i32",
         "large_tiles": "*i32", "num_large_tiles": "*i32", "query_start": "*i32", "context_len": "*i32",
         "table_row": "*i32", "num_rows": "i32", "aim": "i32", "first_key": "i32"},
        {"MOST": 1, "WHOLE": True, "STRIPE": 1, "STEP": MIN_PART, "KEYS": KEYS, "TILE": 32, "LARGE_TILE": 64,
         "ROWS": 256},
        {"num_warps": 4},
    ),
    **{
        f"store {name}": (
            qkv_kernel,
            {"q_out": T, **CODES, "qkv": T, "cos": "*fp32", "sin": "*fp32", "q_norm": "*fp32", "k_norm": "*fp32",
             "slot_mapping": "*i64", **SCALES, "qkv_stride": "i32", "block_stride": "i32", "scale_stride": "i32",
             "num_heads": "i32", "num_kv_heads": "i32", "block_size": "i32", "num_slots": "i32", "eps": "fp32"},
            {"HEAD_DIM": 128, "HALF": 32, "NORM": True, "LATE": False, "STORE": True, "HEADS": 8, "BLOCK": 32,
             "REST": 64, "OVERLAP": True, **form},
            {"num_warps": 1},
        )
        for name, form in FORMS.items()
    },
}  # fmt: skip
UNITS, BYTES = "by the units", "by bytes"
CUDA = {"sm_80", "sm_90", "sm_100"}
# `make test` compiles each kernel for two kinds of target, as other files cover all targets; the rest is `full`. The
# forms of sm_90 that are not here are in the tests below.
SHORT = {
    ("decode e4m3 made, stripes", "sm_90"), ("decode e5m2", "gfx942"), ("prefill e4m3 given", "gfx942"),
    ("store e4m3 made", "gfx1100"), ("store e5m2", "sm_90"), ("work, large tiles", "sm_90"),
}  # fmt: skip
TURNS = [
    pytest.param(name, target, marks=() if (name, target) in SHORT else pytest.mark.full)
    for name in KERNELS
    for target in TARGETS
    if target in (OVERLAPPING if UNITS in name else TARGETS if BYTES not in name else CUDA)
]


@pytest.mark.parametrize(("name", "target"), TURNS)
def test_compiles(name, target):
    kernel, signature, constants, options = KERNELS[name]
    if kernel is prefill_kernel:
        constants = {**constants, "FOLD": constants["MADE"] and target != "sm_100"}
    made = compiles(target, kernel, signature, constants, options)
    if UNITS in name and not name.startswith("store"):
        assert "cvt.rn.f16x2.e4m3x2" in made.asm["ptx"]
        assert "bf16.f16" not in made.asm["ptx"]


@pytest.mark.parametrize(
    "form", ["e4m3 by the units", pytest.param("e4m3 given", marks=pytest.mark.full), "e5m2 by bytes"]
)
def test_a_large_tiles_lines_are_summed_up_as_a_small_ones(form):
    """Each warp has its own query rows, and the threads of a row get the same keys: a row's sums have one order."""
    kernel, signature, constants, _ = KERNELS[f"prefill {form}"]
    constants = {**constants, "STAGES": 3, "FOLD": constants["MADE"]}
    layouts = []
    for lines, warps in ((128, 8), (LARGE, 16)):
        options = {"num_warps": warps, "num_stages": 3}
        made = compiles("sm_90", kernel, signature, {**constants, "BLOCK_M": lines}, options, aligned=True)
        layouts.append(set(re.findall(r"#ttg.nvidia_mma<\{.*?\}>", made.asm["ttgir"])))
        assert all(f"warpsPerCTA = [{warps}, 1]" in layout for layout in layouts[-1])
    small, large = ({re.sub(r"warpsPerCTA = \S+ 1\]", "", layout) for layout in found} for found in layouts)
    assert small == large != set()


@pytest.mark.parametrize("form", ["e4m3 by the units", "e5m2 by bytes"])
def test_codes_are_copied_by_sixteen_bytes_and_go_to_the_matrix_units_as_a_bfloat16_does(form):
    kernel, signature, constants, options = KERNELS[f"decode {form}"]
    text = compiles("sm_90", kernel, signature, constants, options, aligned=True).asm["ptx"]
    loop = text[text.rindex("cp.async.wait_group", 0, text.index("mma.sync")) : text.rindex("mma.sync")]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in loop
    assert "ld.shared.b8" not in loop
    assert "ld.shared.b16" not in loop
    assert "cp.async.cg" in text
    assert ("cvt.rn.f16x2.e4m3x2" in text) == (UNITS in form)
    assert "bf16.f16" not in text


def test_nothing_is_read_before_the_kernel_in_front_has_ended_but_the_lists():
    """Early loads of scales would go through the L1 cache, which may hold scales of an earlier step."""
    kernel, signature, constants, options = KERNELS["decode e4m3 by the units"]
    text = compiles("sm_90", kernel, signature, constants, options, aligned=True).asm["ptx"]
    assert text.count("griddepcontrol.wait") == 1
    early = text[: text.index("griddepcontrol.wait")]
    assert "cp.async.cg" not in early
    assert "cp.async.ca" not in early
    assert "ld.global.b" not in early
