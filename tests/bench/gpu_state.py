"""Times kernels of state layers on the accelerator, with real shapes of layers, and compares rates with a copy's rate.

First each kernel is compared with the reference in float64. A step is timed at each of the 16 distances from the base
that rows pass; the step at the last distance folds. "staggered" mixes rows at all distances. For a prompt, the rule is
timed alone and together with convolution, gates and norm. Writes gpu_state.json into the folder --out after each group;
--only "step scan" runs only the named groups; --tune also times other launch options of the same kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.attention.state_meta import StateMeta
from engine.kernels.state.chunks import with_work
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages, cut, delta_rule_reference
from engine.kernels.state.delta_inputs import launch_delta_inputs
from engine.kernels.state.delta_prepare import SIZE, launch_prepare
from engine.kernels.state.delta_rule import convolved_heads, launch_delta_rule
from engine.kernels.state.delta_scan import launch_core
from engine.kernels.state.delta_step import launch_states
from engine.kernels.state.places import placed
from engine.kernels.state.ssd import SsdShape
from engine.kernels.state.ssd_rule import launch_ssd
from engine.kernels.state.ssd_scan import SIZE as SSD_SIZE
from server.bench.timing import rates, times_of
from tests.bench.gpu_state_stages import stages
from tests.kernels.states import Row, delta_weights, drawn_cache, history, meta_of, on, ssd_weights

QWEN = DeltaShape(16, 32, 128, 128, 4, 20)  # Qwen3.6-35B-A3B
NANO = SsdShape(64, 64, 8, 128, 4, 20)  # Nemotron 3 Nano
PAGE_BYTES, FOLD = 32768, 16
HELD = range(2, 2 + FOLD)  # positions after the base before a step, two steps in flight; at the last the step folds
CACHE = 120 << 20  # more bytes than any cache of the card
BF16, LIMIT = torch.bfloat16, 1.5e-2
PLACES = 32
APART: dict[str, Any] = {"INLINE": False}  # folds in programs of their own
TUNINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"FETCH": 0},
    {"PIECE": 16, "maxnreg": 184},
    {"PIECE": 32, "maxnreg": 255},
    {"INLINE": True, "slots": 0, "parts": 1},
    {**APART, "slots": 4, "parts": 4},
    {**APART, "slots": 16, "parts": 2},
    {"FOLD": 8},
)
PAIRS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # options of both launches of a step
    *(({"num_warps": warps, "AHEAD": ahead}, {}) for warps in (1, 2, 4) for ahead in (0, 16)),
    ({}, {"PIECE": 32, "maxnreg": 255}),
    ({}, {"INLINE": True, "slots": 0, "parts": 1}),
    *(({}, {**APART, "slots": slots, "parts": parts}) for slots, parts in ((4, 4), (8, 4), (16, 2))),
)
SCANS: tuple[dict[str, Any], ...] = (
    {"num_warps": 4},
    {"STAGES": 2},
    {"BLOCK_V": 64, "STAGES": 1},  # uses matrix instructions of four warps
    {"BLOCK_V": 16, "num_warps": 4},
)
time_of = partial(times_of, device="cuda")


def pages_of(
    shape: DeltaShape | SsdShape, rows: int, deltas: torch.dtype = torch.float32
) -> tuple[StatePages, torch.Tensor]:
    """Pages and runs of `rows` rows, numbered as in meta_of, with drawn numbers; checkpoints share block 0."""
    given = (BF16, torch.float32, deltas) if isinstance(shape, DeltaShape) else (BF16, torch.float32)
    parts, tail = shape.parts(*given)
    size = placed(parts, PAGE_BYTES)[1], placed(tail, PAGE_BYTES, shape.ring)[1]
    each = 2 * size[0] + size[1]
    blocks = torch.randperm(rows * each, device="cuda", dtype=torch.int32).view(rows, each) + 1
    table = torch.zeros(1 + 8 * rows, max(size), dtype=torch.int32, device="cuda")
    table[1::8, : size[0]] = blocks[:, : size[0]]
    table[2::8, : size[1]] = blocks[:, size[0] : sum(size)]
    table[3::8, : size[0]] = blocks[:, sum(size) :]
    pages = torch.empty(1 + rows * each, PAGE_BYTES // 2, dtype=BF16, device="cuda").normal_(0, 0.05)
    return cut(pages.view(torch.uint8), parts, tail, shape.ring), table


def step_bytes(shape: DeltaShape, rows: int, held: list[int], deltas: int = 4) -> int:
    """Bytes that a step has to move: states, tails, the products and the result."""
    state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    position = 2 * shape.key_width + deltas * shape.value_width + 4 * shape.value_heads
    folds = sum(each == HELD[-1] for each in held) * len(held) // len(held)
    own = 2 * (shape.columns[-1] + shape.taps * shape.conv_width + shape.value_width) + position
    return rows * (state + own) + position * sum(held) + folds * state


def step_meta(table: torch.Tensor, held: list[int]) -> StateMeta:
    rows = [Row(64 + each, 65 + each, 64, 64 + FOLD * (each == HELD[-1])) for each in held]
    return replace(on(meta_of(rows, table), "cuda"), decode_only=True)


def correct(shape: DeltaShape = QWEN, device: str = "cuda", page_bytes: int = PAGE_BYTES) -> list[dict]:
    """Compares a step of short and long rows with the reference: results, states, newest position of each tail."""
    found = [line for dtype in (BF16, torch.float32) for line in stages(shape, dtype, device, page_bytes)]
    for option in SCANS:
        found += stages(shape, BF16, device, page_bytes, option)
    rows = [Row(0, 1), Row(80, 81, 64), Row(81, 82, 64, 80), Row(66, 70, 64)]
    rows += [Row(70, 211, 64, 208, (128, 144)), Row(0, 63, 0, 48)]
    torch.manual_seed(0)
    parts, tail = shape.parts(BF16, torch.float32)
    places, table = drawn_cache(parts, tail, shape.ring, 8 * len(rows), page_bytes)
    meta, weights = meta_of(rows, table, 2), delta_weights(shape)
    before = history(rows, meta)
    drawn = torch.randn(int(before.query_start[-1]), shape.columns[-1]).to(BF16)
    delta_rule_reference(drawn, weights, shape, places, before)
    pages = places.pages.to(device, copy=True)
    projected = torch.randn(sum(row.end - row.start for row in rows), shape.columns[-1]).to(BF16)
    want = delta_rule_reference(projected.double(), weights, shape, places, meta)
    held = DeltaWeights(*(getattr(weights, name).to(device) for name in DeltaWeights.__slots__))
    cache = cut(pages, parts, tail, shape.ring)
    got = launch_delta_rule(projected.to(device), held, shape, cache, on(meta, device)).cpu()
    pages, bounds = pages.cpu(), meta.query_start.tolist()

    def compare(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        error = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
        found.append({"name": name, "error": error, "ok": error < LIMIT})

    for number, row in enumerate(rows):
        first, last = bounds[number : number + 2]
        compare(f"row {number}", got[first:last], want[first:last])
        for run in [int(meta.write_run[number]), *meta.checkpoint_run[number].tolist()]:
            if run:
                mine, theirs = (places.state[0].read(each, table[run]) for each in (pages, places.pages))
                compare(f"state of row {number}", mine, theirs)
        blocks, slot = table[int(meta.tail_run[number])], (row.end - 1) % shape.ring
        for part, place in zip(("k", "u", "g", "input"), places.tail):
            mine, theirs = (place.read(each, blocks, slot * place.rows, place.rows) for each in (pages, places.pages))
            compare(f"last {part} of row {number}", mine, theirs)
    return found


def timed(name: str, calls: list[Callable[[], object]], num_bytes: int, copy: float) -> dict:
    median, low, high = time_of(calls)
    print(f"{name}: {median * 1e6:.1f} us, {num_bytes / median / copy:.1%} of the copy", flush=True)
    return {"name": name, "us": median * 1e6, "p10": low * 1e6, "p90": high * 1e6, "of_copy": num_bytes / median / copy}


def tuned(name: str, calls: list[Callable[[], object]], num_bytes: int, copy: float) -> dict:
    """Returns `timed`'s line; if the card refuses the launch, prints the error and returns a line for it."""
    try:
        return timed(name, calls, num_bytes, copy)
    except Exception as error:
        print(f"{name}: {error!r:.200}", flush=True)
        return {"name": name, "error": repr(error)}


def steps(copy: float, tune: bool, shape: DeltaShape = QWEN) -> list[dict]:
    """Times steps of one token per row."""
    found = []
    weights = DeltaWeights(*(getattr(delta_weights(shape), name).cuda() for name in DeltaWeights.__slots__))
    for rows in (256, 32, 1):
        sets = max(1, min(16, CACHE // (rows * 4 * shape.value_heads * shape.key_dim * shape.value_dim)))
        for deltas in (torch.float32, BF16) if rows == 256 else (torch.float32,):
            cache, table = pages_of(shape, rows * sets, deltas)
            tables = [torch.cat([table[:1], table[1 + 8 * rows * each :][: 8 * rows]]) for each in range(sets)]
            projected = torch.randn(rows, shape.columns[-1], dtype=BF16, device="cuda")
            every = rows == 256 and deltas is torch.float32
            kinds = {f"held {held}": [held] * rows for held in HELD if every or held in (2, 10, 17)}
            kinds["staggered"] = [HELD[each % FOLD] for each in range(rows)]
            whole = []
            for kind, held in kinds.items():
                metas = [step_meta(each, held) for each in tables]
                size = step_bytes(shape, rows, held, deltas.itemsize)
                name = f"delta step {rows}, u {str(deltas)[6:]}, {kind}"
                calls = [partial(launch_delta_rule, projected, weights, shape, cache, meta) for meta in metas]
                found.append(timed(name, calls, size, copy))
                whole.append(found[-1]["us"])
                out, inputs = projected.new_empty(rows, shape.value_width), partial(launch_delta_inputs, projected)
                if kind in ("held 10", "held 17", "staggered"):
                    calls = [partial(inputs, weights, shape, cache, meta, PLACES) for meta in metas]
                    found.append(timed(f"{name}, inputs alone", calls, size, copy))
                tuning = tune and deltas is torch.float32 and kind in ("held 10", "held 17", "staggered")
                options, pairs = (TUNINGS, PAIRS) if tuning else ((), ())
                for pair in pairs:
                    calls = [partial(both, pair, projected, weights, shape, cache, meta, out) for meta in metas]
                    found.append(tuned(f"{name}, inputs {pair[0]}, states {pair[1]}", calls, size, copy))
                made = inputs(weights, shape, cache, metas[0], PLACES)
                for option in options:
                    calls = [
                        partial(launch_states, *made, projected, weights, shape, cache, meta, out, option)
                        for meta in metas
                    ]
                    found.append(tuned(f"{name}, states alone {option or ''}", calls, size, copy))
            if every:
                found.append(
                    {"name": f"delta step {rows}, u {str(deltas)[6:]}, mean of {FOLD}", "us": sum(whole[:FOLD]) / FOLD}
                )
                print(found[-1], flush=True)
            del cache, table, tables
    return found


def both(
    pair: tuple[dict[str, Any], dict[str, Any]],
    projected: torch.Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    cache: StatePages,
    meta: StateMeta,
    out: torch.Tensor,
) -> None:
    """Launches a step of short rows with these options."""
    made = launch_delta_inputs(projected, weights, shape, cache, meta, PLACES, pair[0])
    launch_states(*made, projected, weights, shape, cache, meta, out, pair[1])


def scans(copy: float, tune: bool, shape: DeltaShape = QWEN, tokens: int = 8192) -> list[dict]:
    """Times one prompt from its first token on."""
    found = []
    weights = DeltaWeights(*(getattr(delta_weights(shape), name).cuda() for name in DeltaWeights.__slots__))
    cache, table = pages_of(shape, 1)
    meta = with_work(on(meta_of([Row(0, tokens, 0, tokens - FOLD)], table), "cuda"), tokens, shape.ring, SIZE)
    projected = torch.randn(tokens, shape.columns[-1], dtype=BF16, device="cuda")
    size = 2 * tokens * (shape.conv_width + shape.value_width)
    out, made = (
        projected.new_empty(tokens, shape.value_width),
        convolved_heads(projected, weights, shape, cache, meta, True),
    )
    for option in (None, *SCANS) if tune else (None,):
        call = partial(launch_core, made, projected, weights, shape, cache, meta, out, option)
        found.append(tuned(f"delta core {tokens} {option or ''}", [call], size, copy))
    call = partial(launch_prepare, made, projected, weights, shape, meta.work)
    found.append(timed(f"delta prepare {tokens}", [call], size, copy))
    call = partial(convolved_heads, projected, weights, shape, cache, meta, False)
    found.append(timed(f"delta conv {tokens}", [call], 4 * tokens * shape.conv_width, copy))
    call = partial(launch_delta_rule, projected, weights, shape, cache, meta)
    found.append(timed(f"delta whole {tokens}", [call], 2 * tokens * (shape.columns[-1] + shape.value_width), copy))
    return found


def on_card(weights: Any) -> Any:
    found = (getattr(weights, name) for name in type(weights).__slots__)
    return type(weights)(*(each if each is None else each.cuda() for each in found))


def ssd(copy: float, shape: SsdShape = NANO, tokens: int = 8192) -> list[dict]:
    """Times Mamba-2: steps of one token per row, and one prompt from its first token on."""
    found, weights = [], on_card(ssd_weights(shape))
    state = 4 * shape.heads * shape.state_size * shape.head_dim
    position, own = (
        2 * shape.again_width + 4 * shape.heads,
        2 * (shape.columns[-1] + 4 * shape.conv_width + shape.inner),
    )
    for rows in (256, 32, 1):
        sets = max(1, min(16, CACHE // (rows * state)))
        cache, table = pages_of(shape, rows * sets)
        tables = [torch.cat([table[:1], table[1 + 8 * rows * each :][: 8 * rows]]) for each in range(sets)]
        projected = torch.randn(rows, shape.columns[-1], dtype=BF16, device="cuda")
        kinds = {f"held {held}": [held] * rows for held in (2, 10, 17)}
        kinds["staggered"] = [HELD[each % FOLD] for each in range(rows)]
        for kind, held in kinds.items():
            folds = sum(each == HELD[-1] for each in held) * state
            calls = [partial(launch_ssd, projected, weights, shape, cache, step_meta(each, held)) for each in tables]
            size = rows * (state + own) + position * sum(held) + folds
            found.append(timed(f"ssd step {rows}, {kind}", calls, size, copy))
        del cache, table, tables
    cache, table = pages_of(shape, 1)
    meta = on(meta_of([Row(0, tokens, 0, tokens - FOLD)], table), "cuda")
    meta = with_work(meta, tokens, shape.ring, SSD_SIZE)
    projected = torch.randn(tokens, shape.columns[-1], dtype=BF16, device="cuda")
    call = partial(launch_ssd, projected, weights, shape, cache, meta)
    found.append(timed(f"ssd whole {tokens}", [call], 2 * tokens * (shape.columns[-1] + shape.inner), copy))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="correct step scan ssd")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, wanted = time.perf_counter(), args.only.split()
    copy, product = rates("cuda", BF16)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy": copy, "product": product}
    print(found, flush=True)
    groups: dict[str, Callable[[], list[dict]]] = {
        "correct": correct,
        "step": partial(steps, copy, args.tune),
        "scan": partial(scans, copy, args.tune),
        "ssd": partial(ssd, copy),
    }
    failed = 0
    for name, group in groups.items():
        if name not in wanted:
            continue
        try:
            found[name] = group()
        except Exception:
            traceback.print_exc()
            found[name], failed = traceback.format_exc(), failed + 1
        if name == "correct" and isinstance(found[name], list):
            wrong = [each for each in found[name] if not each["ok"]]
            print(f"correct: {len(found[name]) - len(wrong)} of {len(found[name])}", *wrong, sep="\n", flush=True)
            failed += len(wrong)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
        (args.out / "gpu_state.json").write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
