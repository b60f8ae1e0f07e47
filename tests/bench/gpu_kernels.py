"""Each Triton kernel on the GPU: microseconds, and the fraction of the copy or product rate of the same run.

Timed like `bench` (server/bench/timing.py): graphs of calls over inputs larger than the cache. Prints each case with
the expectation of PERFORMANCE.md section 5, and writes gpu_kernels.json into the folder given by --out after each group
of cases. --only "moe codes" runs the named groups only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from engine.attention.meta import AttentionMeta
from engine.kernels.activation import Activation, glu
from engine.kernels.attention.dense import dense_attention
from engine.kernels.attention.paged import paged_attention
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from engine.kernels.gemm.gated_persistent import gated_product
from engine.kernels.gemm.pack import Placement, pack
from engine.kernels.norm import rms_norm
from engine.kernels.rotate import qkv_rope_store
from server.bench.timing import CALLS, rates, times_of
from tests.bench.gpu_codes import code_cases
from tests.bench.gpu_float8 import float8_cases
from tests.bench.gpu_four_bits import four_bit_cases
from tests.bench.gpu_moe import moe_cases, skewed_cases
from tests.bench.gpu_one_row import one_row_cases
from tests.bench.gpu_sampling import sampling_cases

HEADS, KV_HEADS, DIM, HIDDEN, INNER = 32, 8, 128, 4096, 12288  # Qwen3-8B
FEW_ROWS = {  # required fractions of the experts' copy rate at 1, 32 and 256 rows
    "experts Qwen3-30B-A3B": {"1": 0.75, "32": 0.8, "256": 0.8},
    "experts Qwen3-30B-A3B FP8": {"1": 0.7, "32": 0.75, "256": 0.75},
    "experts gpt-oss-20b": {"1": 0.6, "32": 0.65, "256": 0.65},
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


time_of = partial(times_of, device="cuda")


def expected(name: str) -> tuple[str, float]:
    """A case's requirement: ("of_copy", "of_product" or the larger, "of_bound"; fraction), ("us", most), or 0."""
    if name in ("linear gate_up 1", "linear gate_up 32"):
        return "of_copy", 0.88
    if name in ("linear gate_up 256", "decode 1 x 1024", "decode 32 x 1024", "decode 256 x 1024"):
        return "of_copy", 0.75
    if name in ("decode 32 x 4096", "decode 1 x 32768"):
        return "of_copy", 0.9
    if name.endswith((" 256", " 2048")) and name.startswith(("rms_norm", "silu_mul", "qkv_rope_store")):
        return "of_copy", 0.85
    if name.startswith(("linear gate_up 2048", "gate_up silu")):
        return "of_product", 0.85
    if name in ("prefill 2048", "prefill 8192", "chunk 512 of 8192"):
        return "of_product", 0.5  # 400 of 798 TFLOP/s
    if name == "vision frame 5476":
        return "of_product", 0.76  # 608 TFLOP/s, as the vendor's kernel reaches
    if name.startswith("choose 256"):
        return "us", 150.0 if "top" in name else 60.0
    layer, _, rows = name.rpartition(" ")
    if found := FEW_ROWS.get(layer, {}).get(rows):
        return "of_copy", found
    if name.startswith("experts") and name.endswith(" 2048"):
        return "of_bound", 0.7
    if name.startswith("route, sort, sum") and name.endswith((" 1", " 256")):
        return "us", 8.0 if name.endswith(" 1") else 15.0
    return "", 0.0


def verdict(case: dict) -> str:
    """The expectation of a measured case, and whether the case meets it."""
    what, value = expected(case["name"])
    if not what:
        return case.get("said", "")
    if what == "us":
        seen = case["times"][0] * 1e6
        return f"<= {value:.0f} us {'met' if seen <= value else 'MISSED'}"
    seen = f", {case[what] * 100:.1f} %" if what == "of_bound" else ""  # the other fractions have columns
    return f">= {value * 100:.0f} % {what[3:]}{seen} {'met' if case[what] >= value else 'MISSED'}"


def pages(count: int) -> tuple[torch.Tensor, ...]:
    """Keys and values of `count` blocks, adjacent in each page as in a layer's cache (engine/cache/spec)."""
    return draw(count, 2, KV_HEADS, 16, DIM).unbind(1)


def step(contexts: list[int], queries: list[int]) -> tuple[torch.Tensor, list, AttentionMeta]:
    counts = [-(-length // 16) for length in contexts]
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    order, used = torch.randperm(sum(counts) + 1).to(torch.int32), 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).cuda()
    lengths = torch.tensor(contexts, dtype=torch.int32).cuda()
    meta = AttentionMeta(
        starts,
        lengths,
        tables.cuda(),
        torch.zeros(0).cuda(),
        decode_only=max(queries) == 1,
    )
    room = max_parts(len(order), 16, len(contexts))
    work = empty_list(len(contexts), sum(queries), room, HEADS, DIM, "cuda")
    fill_list(work, meta, HEADS // KV_HEADS)
    copies = max(1, min(4, (200 << 20) // (len(order) * KV_HEADS * 16 * DIM * 4)))
    caches = [pages(len(order)) for _ in range(copies)]
    return draw(sum(queries), HEADS, DIM), caches, replace(meta, work=work)


def attention(name: str, contexts: list[int], queries: list[int]) -> dict:
    q, caches, meta = step(contexts, queries)
    took = time_of([lambda k=k, v=v: paged_attention(q, k, v, meta, DIM**-0.5) for k, v in caches])
    flops = sum(4 * HEADS * DIM * (n * c - n * (n - 1) / 2) for n, c in zip(queries, contexts))
    return {"name": name, "times": took, "bytes": sum(contexts) * KV_HEADS * DIM * 4, "flops": flops}


def tower(name: str, heads: int, dim: int, lengths: list[int]) -> dict:
    """Attention inside segments; q and k come from one tensor and v from another, as in the vision tower."""
    rows = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    inputs = [(draw(rows, 2 * heads, dim), draw(rows, 3 * heads, dim)) for _ in range(4)]
    sets = [(qk[:, :heads], qk[:, heads:], qkv[:, 2 * heads :]) for qk, qkv in inputs]
    took = time_of([lambda s=s: dense_attention(*s, bounds, dim**-0.5) for s in sets])
    flops = sum(4 * heads * dim * n * n for n in lengths)
    return {"name": name, "times": took, "bytes": 4 * rows * heads * dim * 2, "flops": flops}


def rows_of(count: int) -> list[dict]:
    """The small kernels and products of one layer at `count` tokens."""
    found = []
    sets = max(2, (60 << 20) // (count * HIDDEN * 6) + 1)
    inputs = [draw(count, HIDDEN) for _ in range(min(sets, CALLS))]
    weight = torch.randn(HIDDEN, device="cuda")
    took = time_of([lambda x=x: rms_norm(x, weight, 1e-6) for x in inputs])
    found.append({"name": f"rms_norm {count}", "times": took, "bytes": count * HIDDEN * 2 * 2})
    inputs = [draw(count, 2 * INNER) for _ in range(min(sets, 8))]
    took = time_of([lambda x=x: glu(x, Activation.SILU) for x in inputs])
    found.append({"name": f"silu_mul {count}", "times": took, "bytes": count * INNER * 2 * 3})
    width = (HEADS + 2 * KV_HEADS) * DIM
    cos = torch.randn(count, DIM // 2, device="cuda")
    slots, norm = torch.randperm(4096 * 16, device="cuda")[:count], torch.randn(DIM, device="cuda")
    k_cache, v_cache = pages(4096)
    inputs = [draw(count, width) for _ in range(min(sets, 8))]
    args = (cos, cos, norm, norm, 1e-6, HEADS, KV_HEADS, DIM, k_cache, v_cache, slots)
    took = time_of([lambda x=x: qkv_rope_store(x, *args) for x in inputs])
    found.append({"name": f"qkv_rope_store {count}", "times": took, "bytes": count * width * 2 * 2 + count * DIM * 4})
    x = draw(count, HIDDEN)
    weights = [pack(draw(2 * INNER, HIDDEN), None, Placement(torch.bfloat16, "cuda")) for _ in range(2)]
    took = time_of([lambda w=w: w.linear(x) for w in weights])
    found.append(
        {
            "name": f"linear gate_up {count}",
            "times": took,
            "bytes": 2 * INNER * HIDDEN * 2,
            "flops": 4 * count * INNER * HIDDEN,
        }
    )
    return found


def gated(count: int) -> list[dict]:
    """The gate-up product with silu at `count` tokens, alternately by the vendor's product and by ours."""
    weights = [draw(2 * INNER, HIDDEN) / HIDDEN**0.5 for _ in range(2)]
    x, out = draw(count, HIDDEN), draw(count, INNER)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "vendor": lambda weight: glu(torch.mm(x, weight.t()), Activation.SILU),
        "ours": lambda weight: gated_product(x, weight, None, out, Activation.SILU),
    }
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(2):
        for name, way in ways.items():
            turns[name].append(time_of([lambda way=way, w=w: way(w) for w in weights]))
    size = 2 * (2 * INNER * HIDDEN + count * (HIDDEN + INNER))
    return [
        {
            "name": f"gate_up silu {count} {name}",
            "times": tuple(statistics.mean(turn) for turn in zip(*turns[name])),
            "bytes": size,
            "flops": 4 * count * INNER * HIDDEN,
        }
        for name in ways
    ]


def every_group() -> dict[str, list[Callable[[], list[dict]]]]:
    """Name -> groups of cases; a failing group does not stop the others."""
    windows = [high * wide * 4 for high in [4] * 9 + [1] for wide in [4] * 9 + [1]]  # windows of 74 x 74 patches
    return {
        "layer": [lambda count=count: rows_of(count) for count in (1, 32, 256, 2048)],
        "gated": [lambda count=count: gated(count) for count in (512, 2048)],
        "attention": [
            lambda: [attention(f"decode {rows} x {context}", [context] * rows, [1] * rows)
                     for rows, context in ((1, 1024), (32, 1024), (256, 1024), (32, 4096), (1, 32768))],
            lambda: [attention("decode 31 x 512 + 1 x 32768", [512] * 31 + [32768], [1] * 32)],
            lambda: [attention(f"prefill {n}", [n], [n]) for n in (512, 1024, 2048, 8192)],
            lambda: [attention(f"prefill {rows} x 1024", [1024] * rows, [1024] * rows) for rows in (2, 8)],
            lambda: [attention("chunk 512 of 8192", [8192], [512])],
        ],
        "towers": [
            lambda: [tower("vision windows 5476", 16, 80, windows), tower("vision frame 5476", 16, 80, [5476])],
            lambda: [tower("audio chunks 1500", 20, 64, [100] * 15)],
        ],
        "sampling": [lambda rows=rows: sampling_cases(time_of, (rows,)) for rows in (1, 32, 256)],
        "codes": code_cases(time_of, step),
        "moe": moe_cases(time_of),
        "moe_skewed": skewed_cases(time_of),
        "float8": float8_cases(time_of),
        "one_row": one_row_cases(time_of),
        "four_bits": four_bit_cases(time_of),
    }  # fmt: skip


def complete(case: dict, copy: float, product: float) -> None:
    """Computes the fractions of a case and prints its line."""
    median, low, high = case["times"]
    case["of_copy"] = case["bytes"] / median / copy
    case["of_product"] = case.get("flops", 0) / median / product
    case["of_bound"] = max(case["of_copy"], case["of_product"])
    case["expected"] = verdict(case)
    print(
        f"{case['name']:<34}{median * 1e6:9.1f}{low * 1e6:9.1f}{high * 1e6:9.1f}"
        f"{case['of_copy'] * 100:8.1f}{case['of_product'] * 100:10.1f}  {case['expected']}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", default="", help=f"of {' '.join(every_group())}")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy, product = rates("cuda", torch.bfloat16)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": copy, "product_flops": product, "cases": []}
    print(f"{report['device']}: copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':<34}{'us':>9}{'p10':>9}{'p90':>9}{'% copy':>8}{'% product':>10}  expected")
    failed = 0
    for group in chain(*(cases for name, cases in every_group().items() if name in (args.only.split() or [name]))):
        try:
            found = group()
        except Exception:
            failed += 1
            traceback.print_exc()
            continue
        for case in found:
            complete(case, copy, product)
        report["cases"] += found
        (args.out / "gpu_kernels.json").write_text(json.dumps(report, indent=2) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
