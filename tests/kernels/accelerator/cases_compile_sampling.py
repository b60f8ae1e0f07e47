"""The sampling kernels compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.base.limits import MAX_HISTORY
from engine.kernels.sampling.cut import CHUNK, cut_kernel
from engine.kernels.sampling.groups import GROUP, TILE, groups_kernel
from engine.kernels.sampling.logprobs import BLOCK, log_sum_kernel
from engine.kernels.sampling.pick import OPEN, pick_kernel
from engine.kernels.sampling.top_logprobs import MOST, top_logprobs_kernel
from engine.kernels.sampling.top_p_rejection import LANES, LEAST_P, TRIALS, WIDE
from tests.kernels.accelerator.targets import cases, compiles

I, F = "*i32", "*fp32"  # noqa: E741
LAST = {
    "sample_row": I, "sample_slot": I, "sample_place": I, "vocab": "i32", "logits_stride": "i32", "num_groups": "i32",
}  # fmt: skip
OUT = {"tokens_out": I, "bounds": F, "chosen": I, "best": F, "mass": F, "work": F}
COUNTED = {"counts": I, "seen": I}
ROW = {"OPEN": OPEN, "TRIALS": TRIALS, "GROUP": GROUP}
KERNELS = {
    "log sum": (log_sum_kernel, {"out": F, "logits": F, "vocab": "i32"}, {"BLOCK": BLOCK}, {"num_warps": 8}),
    **{
        f"groups {dtype} {width}": (
            groups_kernel,
            {"best": F, "mass": F, "moments": F, "work": F, "logits": dtype, "words": I, **COUNTED, "allowed": I,
             "edits": I, "repeats": I, "sample_row": I, "sample_slot": I, "sample_place": I, "drafts": I,
             "vocab": "i32", "logits_stride": "i32", "num_groups": "i32", "along": "i32"},
            {"WIDTH": width, "GROUP": GROUP, "TILE": TILE, "HISTORY": MAX_HISTORY}
            | ({} if width > 1 else {"drafts": None}),
            {"num_warps": 4},
        )
        for dtype, width in (("*bf16", 1), ("*fp32", 1), ("*bf16", 6))
    },
    **{
        f"pick {dtype} {runs}": (
            pick_kernel, {**OUT, "logits": dtype, "words": I, **LAST},
            {**ROW, "RUNS": runs, "LEAST_P": LEAST_P, "LANES": LANES, "CHUNK": WIDE}, {"num_warps": 8},
        )
        for dtype, runs in (("*bf16", False), ("*fp32", False), ("*bf16", True))
    },
    **{
        f"cut {dtype} {exact} {runs}": (
            cut_kernel,
            {**OUT, "logits": dtype, "words": I, "moments": F, **COUNTED, "repeats": I, "breakers": I, **LAST,
             "num_tiles": "i32"},
            {**ROW, "RUNS": runs, "LANES": 4096, "TILES": 64, "WIDE": LANES, "HISTORY": MAX_HISTORY, "EXACT": exact,
             "SHIFT": shift, "CHUNK": CHUNK},
            {"num_warps": 8},
        )
        for dtype, shift, exact, runs in (
            ("*bf16", 16, False, False), ("*fp32", 0, False, False), ("*fp32", 0, True, False),
            ("*bf16", 16, False, True),
        )
    },
    **{
        f"top logprobs {dtype} {as_logits}": (
            top_logprobs_kernel,
            {"ring": I, "tops": I, "logits": dtype, "words": I, "tokens": I, "home": I, "sample_row": I,
             "sample_slot": I, "vocab": "i32", "logits_stride": "i32", "num_groups": "i32", "num_buffers": "i32",
             "max_rows": "i32"},
            {"AS_LOGITS": as_logits, "MOST": MOST, "WIDTH": 32, "LANES": 4096, "GROUP": GROUP, "TILE": GROUP},
            {"num_warps": 8},
        )
        for dtype, as_logits in (("*bf16", False), ("*fp32", True))
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
