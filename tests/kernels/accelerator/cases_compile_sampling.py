"""The sampling kernels compile for every target."""

import pytest
import triton  # noqa: F401  (before any kernel file, so that they take it)

from engine.kernels.sampling.cut import CHUNK, cut_kernel
from engine.kernels.sampling.edit import edit_kernel
from engine.kernels.sampling.groups import GROUP, TILE, groups_kernel
from engine.kernels.sampling.logprobs import BLOCK, log_sum_kernel
from engine.kernels.sampling.mask import mask_kernel
from engine.kernels.sampling.nucleus import LANES, LEAST_P, TRIALS, WIDE
from engine.kernels.sampling.penalize import count_kernel, penalize_kernel
from engine.kernels.sampling.pick import OPEN, pick_kernel
from tests.kernels.accelerator.targets import cases, compiles

I, F = "*i32", "*fp32"  # noqa: E741
TABLES = {
    "words": I, "sample_row": I, "sample_slot": I, "sample_place": I, "vocab": "i32",
    "logits_stride": "i32", "num_groups": "i32",
}  # fmt: skip
OUT = {"tokens_out": I, "threshold": F, "chosen": I, "best": F, "mass": F}
ROW = {"OPEN": OPEN, "TRIALS": TRIALS, "GROUP": GROUP}
KERNELS = {
    "log sum": (log_sum_kernel, {"out": F, "logits": F, "vocab": "i32"}, {"BLOCK": BLOCK}, {"num_warps": 8}),
    "edit": (edit_kernel, {"logits": F, "edits": I, "num_edits": "i32", "rows": "i32", "vocab": "i32"},
             {"BLOCK": 256}, {}),
    "mask": (mask_kernel, {"logits": F, "bits": I, "line": I, "vocab": "i32", "words": "i32"}, {"BLOCK": 1024}, {}),
    "penalize": (
        penalize_kernel,
        {"logits": F, "counts": I, "prompt_bits": I, "slot_words": I, "line": I, "slot": I, "vocab": "i32",
         "words": "i32"},
        {"BLOCK": 1024}, {},
    ),
    "count": (count_kernel, {"counts": I, "token": I, "line": I, "rows": "i32", "vocab": "i32"}, {"BLOCK": 256}, {}),
    **{
        f"groups {dtype}": (
            groups_kernel,
            {"best": F, "mass": F, "logits": dtype, "words": I, "sample_row": I, "sample_slot": I,
             "vocab": "i32", "logits_stride": "i32", "num_groups": "i32"},
            {"GROUP": GROUP, "TILE": TILE}, {"num_warps": 4},
        )
        for dtype in ("*bf16", "*fp32")
    },
    **{
        f"pick {dtype}": (
            pick_kernel, {**OUT, "logits": dtype, **TABLES},
            {**ROW, "LEAST_P": LEAST_P, "LANES": LANES, "CHUNK": WIDE}, {"num_warps": 8},
        )
        for dtype in ("*bf16", "*fp32")
    },
    **{
        f"cut {dtype} {exact}": (
            cut_kernel, {**OUT, "logits": dtype, **TABLES},
            {**ROW, "LANES": 4096, "EXACT": exact, "SHIFT": shift, "CHUNK": CHUNK}, {"num_warps": 8},
        )
        for dtype, shift, exact in (("*bf16", 16, False), ("*fp32", 0, False), ("*fp32", 0, True))
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
