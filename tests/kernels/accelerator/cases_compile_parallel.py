"""The kernels between ranks compile for every target."""

import pytest
import triton  # must precede the import of any kernel file
from triton.compiler import ASTSource

from engine.kernels.parallel.choice import (
    BLOCK,
    await_logits_kernel,
    fetch_logits_kernel,
    send_logits_kernel,
)
from engine.kernels.parallel.dealt_norm import dealt_norm_kernel, dealt_squares_kernel
from engine.kernels.parallel.one_shot import one_shot_kernel
from engine.kernels.parallel.room import BATCH
from engine.kernels.parallel.tokens import (
    send_guesses_kernel,
    send_slots_kernel,
    take_guesses_kernel,
    take_slots_kernel,
)
from engine.kernels.parallel.two_shot import two_shot_kernel
from tests.kernels.accelerator.targets import TARGETS, cases, compiles


def tensors(dtype, ranks):
    rooms = tuple("i64" for _ in range(ranks))
    return {
        "out": f"*{dtype}",
        "residual": f"*{dtype}",
        "x": f"*{dtype}",
        "weight": "*fp32",
        "rooms": rooms,
        "own": "i64",
        "rank": "i32",
    }


ENDS = {"error": "i64", "rows": "i32", "width": "i32"}
ONE = {**ENDS, "at_turns": "i32", "at_small": "i32", "small": "i32", "polls": "i32", "eps": "fp32"}
TWO = {
    **ENDS, "at_pushed": "i32", "at_gathered": "i32", "at_partials": "i32", "at_sums": "i64", "most_batches": "i32",
    "own_rows": "i32", "polls": "i32", "eps": "fp32",
}  # fmt: skip
KERNELS = {
    f"{way} of {ranks}, {dtype}, add {add}, norm {norm}": (
        kernel,
        {**tensors(dtype, ranks), **rest},
        {"RANKS": ranks, "ADD": add, "NORM": norm, "PHASES": 7, "BLOCK": 4096, "OVERLAP": True, **own},
    )
    for ranks, dtype, add, norm in ((2, "bf16", True, True), (4, "bf16", True, False), (8, "fp32", False, False))
    for way, kernel, rest, own in (
        ("one-shot", one_shot_kernel, ONE, {"PTX": True}),
        ("two-shot", two_shot_kernel, TWO, {"BATCH": BATCH, "MAPPED": False}),
        ("two-shot through the host", two_shot_kernel, TWO, {"BATCH": BATCH, "MAPPED": True}),
    )
}


@pytest.mark.parametrize(("name", "target"), cases(KERNELS))
def test_compiles(name, target):
    kernel, signature, constants = KERNELS[name]
    if "PTX" in constants:
        constants = {**constants, "PTX": target.startswith("sm")}
    made = compiles(target, kernel, signature, constants, {"num_warps": 8})
    if target.startswith("sm"):  # peers see stores and flags at the scope of the system
        text = made.asm["ptx"]
        assert "st.global.wt" in text
        assert ("ld.volatile" if "PTX" in constants else "atom.global.sys.release") in text


@pytest.mark.parametrize("name", [name for name in KERNELS if "bf16, add True, norm True" in name])
def test_values_travel_in_vectors_of_16_bytes(name):
    kernel, signature, constants = KERNELS[name]
    even = [each for each in signature if each[:3] in ("out", "res", "at_") or each in ("x", "own", "width", "small")]
    places = [(kernel.arg_names.index(each),) for each in even]
    places += [(kernel.arg_names.index("rooms"), rank) for rank in range(constants["RANKS"])]
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    text = triton.compile(source, target=TARGETS["sm_90"][0], options={"num_warps": 8}).asm["ptx"]
    assert ".b16" not in "".join(line for line in text.splitlines() if ".global" in line)
    assert ("ld.volatile.global.v4.b32" if "PTX" in constants else "ld.global.cv.v4.b32") in text
    assert "st.global.wt.v4.b32" in text


SUMS = {"first": "i32", "first_width": "i32", "second_width": "i32"}
ALL = {"TOTAL": 2, "BLOCK": 4096, "OVERLAP": True}
NORMS = {
    "sums of squares": (dealt_squares_kernel, {"sums": "*fp32", "x": "*bf16", "stride": "i32", **SUMS}, ALL),
    **{
        f"norm of parts{' and gate' * gate}": (
            dealt_norm_kernel,
            {
                "x": "*bf16", "sums": "*fp32", "first_weight": "*fp32", "second_weight": "*fp32",
                **({"gates": "*bf16"} if gate else {}), "stride": "i32", "gate_stride": "i32", **SUMS,
                "first_count": "i32", "second_count": "i32", "eps": "fp32",
            },
            ALL if gate else {**ALL, "gates": None},
        )
        for gate in (False, True)
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "target"), cases(NORMS))
def test_norms_compile(name, target):
    compiles(target, *NORMS[name], {"num_warps": 8})


SIZES = dict.fromkeys(("rank", "column", "columns", "width"), "i32")
AWAITED = {"own": "i64", "error": "i64", "polls": "i32"}
CHOICE = {
    "logits are sent": (
        send_logits_kernel,
        {"logits": "i64", "part": "*bf16", "first": "i64", "own": "i64", **SIZES},
        {"BLOCK": BLOCK},
    ),
    "logits are awaited": (await_logits_kernel, AWAITED, {"RANKS": 4, "MAPPED": False}),
    "logits are awaited in host memory": (await_logits_kernel, AWAITED, {"RANKS": 4, "MAPPED": True}),
    "logits are fetched": (
        fetch_logits_kernel,
        {"out": "*bf16", "logits": "i64", "part": "*bf16", "columns": "i32", "width": "i32"},
        {"BLOCK": BLOCK},
    ),
}  # fmt: skip


SLOTS = {"words": "*i32", "drafts": "*i32", "survivals": "*i32"}
ROWS = {"sample_row": "*i32", "sample_slot": "*i32", "num_sampled": "*i32", "most": "i32"}
LINES = {"token_ids": "*i64", "sample_index": "*i64", "num_sampled": "*i32", "most": "i32"}
CHOICE |= {
    f"words of {drafts} drafts are sent to {ranks}": (
        send_slots_kernel,
        {"rooms": ("i64",) * ranks, **SLOTS, **ROWS},
        {"AT": 1280, "NUM": drafts, "COUNT": count, "WORDS": words, "WIDTH": width, "RANKS": ranks, "BLOCK": 64},
    )
    for ranks, drafts, count, words, width in ((2, 3, 9, 16, 5), (4, 0, 1, 1, 1), (8, 7, 17, 32, 9))
}
CHOICE |= {
    f"words of {drafts} drafts are taken{where}": (
        take_slots_kernel,
        {**SLOTS, **AWAITED, **ROWS},
        {"AT": 1280, "NUM": drafts, "COUNT": count, "WORDS": words, "WIDTH": width, "MAPPED": mapped, "BLOCK": 64},
    )
    for drafts, count, words, width, mapped, where in ((3, 9, 16, 5, False, ""), (0, 1, 1, 1, True, " in host memory"))
}
CHOICE |= {
    f"guesses are sent to {ranks}": (
        send_guesses_kernel,
        {"rooms": ("i64",) * ranks, **LINES},
        {"RANKS": ranks, "BLOCK": 256},
    )
    for ranks in (2, 8)
}
CHOICE["guesses are taken"] = take_guesses_kernel, {**LINES, **AWAITED}, {"MAPPED": False, "BLOCK": 256}


@pytest.mark.parametrize(("name", "target"), cases(CHOICE))
def test_the_choice_compiles(name, target):
    kernel, signature, constants = CHOICE[name]
    made = compiles(target, kernel, signature, {**constants, "OVERLAP": True}, {"num_warps": 4})
    if target.startswith("sm"):
        if name == "logits are fetched":
            assert "ld.global.cv" in made.asm["ptx"]
            return
        waits = "awaited" in name or "taken" in name
        assert ("sys.acquire" if waits else "sys.release") in made.asm["ptx"]
        assert ("ld.volatile" in made.asm["ptx"]) == ("host" in name)
