"""The kernels for prep, for pooling rows, and for copying tokens and rows to the host compile for every target."""

import pytest
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.kernels.deal_drafts import deal_drafts_kernel
from engine.kernels.pool_home import pool_home_kernel
from engine.kernels.pool_rows import KINDS, pool_kernel
from engine.kernels.record import record_kernel
from engine.kernels.sampling.append import append_kernel
from engine.kernels.sampling.drafts_home import drafts_home_kernel
from engine.kernels.sampling.home import home_kernel
from engine.kernels.sampling.ngram import ngram_kernel
from engine.kernels.sampling.replay import replay_kernel
from engine.kernels.sampling.suffix import CANDIDATES, SCANNED, matches_kernel, suffix_kernel
from engine.kernels.sampling.verify import verify_kernel
from engine.kernels.state_inputs import state_inputs_kernel
from engine.kernels.step_inputs import inputs_kernel
from tests.kernels.accelerator.targets import cases, compiles

I = "*i32"  # noqa: E741
RECORD = {
    "staged": I, "block_tables": I, "words": I, "pinned": I, "turn": I, "num_records": "i32", "capacity": "i32",
    "tokens_at": "i32", "max_tokens": "i32", "at_once": "i32", "tail": "i32", "num_groups": "i32", "max_slots": "i32",
    "max_blocks": "i32",
}  # fmt: skip
INPUTS = {
    "token_ids": "*i64", "positions": "*i64", "slot_mapping": "*i64", "query_start": I, "context_len": I,
    "row_slot": I, "sample_index": "*i64", "sample_row": I, "sample_slot": I, "sample_place": I, "num_rows": I,
    "num_sampled": I, "home": I, "last_keys": I, "adapters": I, "row_drafts": I, "words": I, "block_tables": I,
    "drafts": I, "staged": I, "turn": I,
    "num_records": "i32", "capacity": "i32", "max_rows": "i32", "max_tokens": "i32", "max_slots": "i32",
    "max_blocks": "i32", "block_size": "i32", "num_embeddings": "i32", "max_lines": "i32",
}  # fmt: skip
STATES = {
    "table": I, "rows": I, "checkpoints": I, "places": I, "pinned": I, "turn": I, "words": I,
    **dict.fromkeys(
        ("num_records", "capacity", "max_rows", "rows_at", "max_slots", "states_at", "runs_at", "most_runs", "num_ids",
         "columns", "run_width", "state_blocks"), "i32",
    ),
}  # fmt: skip
HOME = {
    "ring": I, "runs": I, "home": I, "row_slot": I, "row_drafts": I, "words": I, "num_buffers": "i32",
    "max_rows": "i32",
}  # fmt: skip
POOL = {"out": "*fp32", "starts": I, "counted": I, "width": "i32"}
POOL_HOME = {"out": "*fp32", "lines": "*fp32", "home": I, **dict.fromkeys(("num_buffers", "max_rows", "width"), "i32")}
VERIFY = dict.fromkeys(
    (
        "runs",
        "words",
        "counts",
        "seen",
        "repeats",
        "breakers",
        "drafts",
        "estimates",
        "survivals",
        "right",
        "tried",
        "model",
        "row_drafts",
        "row_slot",
        "context_len",
    ),
    I,
)
DEAL = {
    **dict.fromkeys(("words", "survivals", "right", "tried", "model", "staged"), I),
    **dict.fromkeys(("max_rows", "max_tokens", "max_slots"), "i32"),
}
APPEND = {
    **dict.fromkeys(("texts", "words", "runs", "target", "slots", "number"), I),
    "longest": "i32",
    "lines": "i32",
}
REPLAY = {
    **dict.fromkeys(("drafts", "words", "texts", "runs", "row_slot"), I),
    "survivals": "*fp32",
    "longest": "i32",
    "vocab": "i32",
}
NGRAM = {
    "drafts": I, "best": "*i64", **dict.fromkeys(("arrived", "words", "texts", "runs", "row_slot"), I),
    "longest": "i32", "least": "i32",
}  # fmt: skip
MATCHES = {
    "match": "*u8", **dict.fromkeys(("counts", "words", "texts", "runs", "row_slot"), I), "longest": "i32",
}  # fmt: skip
SUFFIX = {
    **dict.fromkeys(("drafts", "counts", "ends", "words"), I), "match": "*u8",
    **dict.fromkeys(("texts", "runs", "row_slot", "budget"), I), "longest": "i32", "least_probability": "fp32",
}  # fmt: skip
KERNELS = {
    **{
        name: (
            verify_kernel, {**VERIFY, "survivals_set": "*fp32", "vocab": "i32"},
            {"NUM": 4, "WIDTH": 6, "LANES": 8, "HISTORY": 4096, **constants}, {"num_warps": 1},
        )
        for name, constants in (("verify", {"survivals_set": None}), ("verify, set", {}))
    },
    **{
        f"deal {rows} {number}": (
            deal_drafts_kernel, DEAL, {"NUM": number, "ROWS": rows, "LANES": lanes, "BITS": 16},
            {"num_warps": warps},
        )
        for rows, number, lanes, warps in ((256, 7, 8, 4), (1024, 63, 64, 32))
    },
    "append": (append_kernel, APPEND, {"BLOCK": 256}, {"num_warps": 4}),
    "replay": (replay_kernel, REPLAY, {"NUM": 4, "WIDTH": 6, "LANES": 8}, {"num_warps": 1}),
    "ngram": (
        ngram_kernel, NGRAM, {"MOST": 5, "NUM": 4, "WIDTH": 6, "LANES": 8, "BLOCK": 1024, "BLOCKS": 4},
        {"num_warps": 4},
    ),
    "matches": (
        matches_kernel, MATCHES,
        {"DEPTH": 24, "BINS": 32, "WIDTH": 18, "LANES": 32, "BLOCK": 1024, "BLOCKS": 4}, {"num_warps": 4},
    ),
    "suffix": (
        suffix_kernel, SUFFIX,
        {"BINS": 32, "NUM": 16, "WIDTH": 18, "LANES": 32, "CANDIDATES": CANDIDATES, "SCANNED": SCANNED},
        {"num_warps": 4},
    ),
    **{
        f"pool {kind} {dtype}{' behind prompts' * skips}": (
            pool_kernel, {"hidden": f"*{dtype}", **POOL},
            {"KIND": number, "SKIPS": skips, "BLOCK_T": 16, "BLOCK_W": 128, "OVERLAP": True}, {"num_warps": 4},
        )
        for kind, number in KINDS.items()
        for dtype, skips in (("bf16", False), ("fp32", False), ("bf16", True))
    },
    **{
        f"states{' fed' * fed}": (
            state_inputs_kernel, STATES,
            {"ROWS": 256, "WIDTH": 256, "OVERLAP": True} | ({} if fed else {"words": None}), {"num_warps": 4},
        )
        for fed in (False, True)
    },
    "drafts home": (
        drafts_home_kernel,
        {"ring": I, "home": I, "row_drafts": I, "row_slot": I, "drafts": I, "num_buffers": "i32", "max_rows": "i32"},
        {"NUM": 7, "BLOCK": 256}, {"num_warps": 4},
    ),
    "pool home": (pool_home_kernel, POOL_HOME, {"BLOCK": 1024, "OVERLAP": True}, {"num_warps": 4}),
    **{
        f"home {width} {drafting}": (
            home_kernel, HOME,
            {"OUTSIDE": -2, "WIDTH": width, "BLOCK": 256, "OVERLAP": True}
            | ({} if drafting else {"row_drafts": None}),
            {"num_warps": 4},
        )
        for width, drafting in ((1, False), (3, False), (3, True))
    },
    **{
        f"record {axes}": (
            record_kernel, RECORD,
            {
                "AXES": axes, "COPIERS": 4, "WORDS": 1024, "BLOCK": 256, "SLOTS": 64, "OVERLAP": True,
            },
            {"num_warps": 4},
        )
        for axes in (0, 1, 3, 4)
    },
    **{
        f"inputs {axes} {bidirectional} {adapted} {drafts}": (
            inputs_kernel, INPUTS,
            {
                "NUM": abs(drafts), "GROUPS": 1 + (axes > 1), "AXES": axes, "ROWS": 512, "STEPS": 9, "BLOCK": 128,
                "OVERLAP": True,
            }
            | ({} if drafts > 0 else {"row_drafts": None, "drafts": None})
            | ({} if bidirectional else {"last_keys": None})
            | ({} if adapted else {"adapters": None}),
            {"num_warps": 4},
        )
        for axes, bidirectional, adapted, drafts in (
            (1, False, False, 0), (3, False, False, 0), (1, True, False, 0), (4, False, False, 0), (1, False, True, 0),
            (1, False, False, 4), (3, True, True, 7), (1, False, False, -4),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    compiles(target, *KERNELS[name])
