"""The kernels for a drafter's places, guesses and features compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.block_convolution import block_convolution_kernel
from engine.kernels.drafts_blocks import block_places_kernel
from engine.kernels.drafts_confidence import take_confidence_kernel
from engine.kernels.drafts_features import accept_features_kernel, features_before_kernel, keep_features_kernel
from engine.kernels.drafts_places import draft_places_kernel, next_places_kernel, put_drafts_kernel
from tests.kernels.accelerator.targets import cases, compiles

I, L = "*i32", "*i64"  # noqa: E741
PLACES = {
    "token": L, "mapping": L, **dict.fromkeys(("context", "run", "place", "left", "line", "slot", "words"), I),
    "row_drafts": I,
    **dict.fromkeys(("row_slot", "context_len", "query_start", "lines"), I), "slot_mapping": L,
    **dict.fromkeys(("rows", "max_rows", "max_slots"), "i32"),
}  # fmt: skip
NEXT = {
    "token": L, "mapping": L, **dict.fromkeys(("context", "run", "place", "left"), I), "slot_mapping": L, "rows": "i32",
}  # fmt: skip
BLOCK = {
    **dict.fromkeys(("token", "ids", "mapping"), L),
    **dict.fromkeys(("run", "place", "slot", "before", "starts", "context", "line", "words", "row_drafts"), I),
    **dict.fromkeys(("row_slot", "context_len", "query_start", "lines"), I), "slot_mapping": L, "token_ids": L,
    **dict.fromkeys(("mask_id", "rows", "queries", "max_rows", "max_slots"), "i32"),
}  # fmt: skip
PUT = {"token_ids": L, "drafts": I, "guesses": I, "token": L, "run": I, "slot": I, "num_tokens": "i32"}
ROWS = {"row_slot": I, "query_start": I}
SIZES = dict.fromkeys(("width", "num_rows"), "i32")


def held(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{dtype}")


KERNELS = {
    "places": (draft_places_kernel, PLACES, {"WIDTH": 5, "ROWS": 256}, {"num_warps": 4}),
    "next places": (next_places_kernel, NEXT, {"BLOCK": 256}, {"num_warps": 4}),
    "block": (block_places_kernel, BLOCK, {"SKIPPED": 1, "WIDTH": 9, "ROWS": 256}, {"num_warps": 4}),
    **{
        f"convolution {dtype}": (
            block_convolution_kernel,
            {**held(dtype, "out", "x", "delta"), "base": "*fp32", "before": I, "width": "i32"},
            {"SIDE": 1, "TAPS": 2, "GROUP": 16, "BLOCK": 1024}, {"num_warps": 4},
        )
        for dtype in ("bf16", "fp32")
    },
    "confidence": (
        take_confidence_kernel,
        {**dict.fromkeys(("survivals", "estimates"), I), "confidence": "*fp32", "row_slot": I, "row_drafts": I},
        {"NUM": 7, "LANES": 8}, {"num_warps": 1},
    ),
    "put": (put_drafts_kernel, PUT, {"AHEAD": 1, "NUM": 3}, {"num_warps": 1}),
    **{
        f"before {dtype}": (
            features_before_kernel,
            {
                **held(dtype, "before", "features", "of_slots", "of_blocks"), **ROWS, "context_len": I, "tables": I,
                "lines": I, **SIZES, "max_blocks": "i32", "block_size": "i32",
            },
            {"STEPS": 9, "BLOCK": 1024}, {"num_warps": 4},
        )
        for dtype in ("bf16", "fp32")
    },
    **{
        f"keep {dtype}": (
            keep_features_kernel,
            {
                **held(dtype, "of_slots", "of_blocks", "features"), **ROWS, "slot_mapping": L, **SIZES,
                "block_size": "i32",
            },
            {"STEPS": 9, "BLOCK": 1024}, {"num_warps": 4},
        )
        for dtype in ("bf16", "fp32")
    },
    "accept without features": (
        accept_features_kernel,
        {"words": I, "runs": I, "row_slot": I, "row_drafts": I, "query_start": I, "width": "i32"},
        {"of_slots": None, "features": None, "DRAFTS": 3, "WIDTH": 5, "LANES": 8, "BLOCK": 1024}, {"num_warps": 4},
    ),
    **{
        f"accept {dtype}": (
            accept_features_kernel,
            {
                **held(dtype, "of_slots"), "words": I, **held(dtype, "features"), "runs": I, "row_slot": I,
                "row_drafts": I, "query_start": I, "width": "i32",
            },
            {"DRAFTS": 3, "WIDTH": 5, "LANES": 8, "BLOCK": 1024}, {"num_warps": 4},
        )
        for dtype in ("bf16", "fp32")
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
