"""The CPU's kernels against torch's, in one run: linear layers, attention, and a whole Qwen3-shaped decoder stack.

`codes` compares our products with quantised weights against our products with the same matrices in bfloat16 and
float32. Our calls and torch's alternate (A B A B), with a pause between, so that neither runs next to the other's
spinning threads. A row prints the best time of each, its rate, and the ratio torch / ours of the best times and of the
medians: above 1 we are faster. The two ratios agree only on an idle machine. All layers have their own weights, so
weights stream from memory as in a model; all cores are used. Run: python -m tests.bench.bench_cpu_ops [--json FILE]
[--only linear,attention,stack,codes] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from _fast import cpu
from engine.attention.meta import AttentionMeta
from engine.kernels.activation import Activation
from engine.kernels.attention.paged import paged_attention
from engine.kernels.gemm.codes import FOUR_BITS, Codes, Kind
from engine.kernels.gemm.group_panels import pack_group_panels
from engine.kernels.gemm.panels import pack_paired, pack_panels
from engine.kernels.norm import rms_norm
from engine.kernels.rope import cos_sin
from engine.kernels.rotate import qkv_rope_store

BLOCK = 16
SQUARE = 4096
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 512, 1536, 8, 4, 64, 8192, 8
MODELS = {  # hidden, intermediate, q rows, kv rows, vocabulary, layers, dtype
    "512/1536 float32": (512, 1536, 512, 256, 8192, 8, torch.float32),
    "1024/3072 bfloat16": (1024, 3072, 1024, 512, 8192, 8, torch.bfloat16),
}


def turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, float]:
    """Best and median seconds per call of each function; each runs five times before the other runs."""
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(rounds):
        for name, run in (("ours", ours), ("torch", theirs)):
            run()
            for _ in range(5):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
            time.sleep(0.005)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "ours": min(times["ours"]),
        "torch": min(times["torch"]),
        "ours_median": medians["ours"],
        "torch_median": medians["torch"],
        "ratio": min(times["torch"]) / min(times["ours"]),
        "ratio_of_medians": medians["torch"] / medians["ours"],
    }


def bench_linear(rounds: int) -> list[dict]:
    rows = []
    for name, (hidden, inner, q_rows, kv_rows, vocab, layers, dtype) in MODELS.items():
        shapes = [(q_rows + 2 * kv_rows, hidden), (hidden, q_rows), (2 * inner, hidden), (hidden, inner)] * layers
        weights = [torch.randn(shape).to(dtype) for shape in [*shapes, (vocab, hidden)]]
        packed = [pack_panels(weight, None) for weight in weights]
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        flops = 2 * sum(weight.numel() for weight in weights)
        for tokens in (1, 8, 32, 128, 512):
            inputs = {k: torch.randn(tokens, k).to(dtype) for k in (hidden, q_rows, inner)}
            row = turns(
                lambda inputs=inputs, packed=packed: [p.linear(inputs[p.in_features]) for p in packed],
                lambda inputs=inputs, weights=weights: [functional.linear(inputs[w.shape[1]], w) for w in weights],
                max(2, rounds // (1 + tokens // 64)),
            )
            row |= {"case": f"linear {name}, {tokens} tokens", "GB/s": size / row["ours"] / 1e9}
            rows.append(row | {"GFLOP/s": tokens * flops / row["ours"] / 1e9})
    return rows


def bench_codes(rounds: int) -> list[dict]:
    """Matrices of SQUARE x SQUARE, more than a cache holds; one scale per 128 columns."""
    found = []
    floats = [torch.randn(SQUARE, SQUARE) / 64 for _ in range(4)]
    dense = {
        str(dtype).removeprefix("torch."): [pack_panels(weight.to(dtype), None) for weight in floats]
        for dtype in (torch.bfloat16, torch.float32)
    }
    scale = torch.rand(SQUARE, SQUARE // 128)
    for kind in (Kind.INT4, Kind.INT8, Kind.E4M3):
        least, most, dtype = (-128, 128, torch.int8) if kind is Kind.INT8 else (0, 16, torch.uint8)
        most = 0x7F if kind is Kind.E4M3 else most
        values = [torch.randint(least, most, (SQUARE, SQUARE)).to(dtype) for _ in floats]
        coded = [pack_group_panels(Codes(kind, each, scale, 128), None, gated=False) for each in values]
        size = len(coded) * SQUARE * SQUARE / (2 if kind in FOUR_BITS else 1)
        for tokens in (1, 16):
            for beside, weights in dense.items():
                x = torch.randn(tokens, SQUARE, dtype=torch.bfloat16 if beside == "bfloat16" else torch.float32)
                row = turns(
                    lambda x=x, coded=coded: [weight.linear(x) for weight in coded],
                    lambda x=x, weights=weights: [weight.linear(x) for weight in weights],
                    max(2, rounds // (1 + tokens // 64)),
                )
                row |= {"case": f"codes {kind.value}, {tokens} tokens", "beside": beside}
                found.append(row | {"GB/s": size / row["ours"] / 1e9})
    return found


def paged_case(rows: int, context: int, queries: int, dtype: torch.dtype = torch.float32):
    """Caches with shuffled blocks, and the metadata of `rows` rows, each ending with `queries` new tokens."""
    count = -(-context // BLOCK)
    tables = (1 + torch.randperm(rows * count).view(rows, count)).to(torch.int32)
    caches = [
        tuple(torch.randn(rows * count + 1, KV_HEADS, BLOCK, DIM).to(dtype) for _ in range(2)) for _ in range(LAYERS)
    ]
    positions = torch.arange(context - queries, context)
    slots = tables[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
    meta = AttentionMeta(
        query_start=torch.arange(rows + 1, dtype=torch.int32) * queries,
        context_len=torch.full((rows,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten().contiguous(),
    )
    return caches, positions.repeat(rows), meta


def bench_attention(rounds: int) -> list[dict]:
    """torch reads contiguous keys and values, so it does not pay for block tables."""
    results = []
    for rows, context, queries in (
        (1, 128, 1),
        (1, 1024, 1),
        (1, 4096, 1),
        (32, 160, 1),
        (1, 128, 128),
        (1, 1024, 1024),
    ):
        caches, _, meta = paged_case(rows, context, queries)
        q = torch.randn(rows * queries, HEADS, DIM)
        theirs = [tuple(torch.randn(rows, KV_HEADS, context, DIM) for _ in range(2)) for _ in range(LAYERS)]
        q4 = torch.randn(rows, HEADS, queries, DIM)
        row = turns(
            lambda caches=caches, q=q, meta=meta: [paged_attention(q, k, v, meta, 0.125) for k, v in caches],
            lambda theirs=theirs, q4=q4, causal=queries > 1: [
                functional.scaled_dot_product_attention(q4, k, v, is_causal=causal, enable_gqa=True) for k, v in theirs
            ],
            max(2, rounds // (1 + queries // 64)),
        )
        size = LAYERS * rows * context * KV_HEADS * DIM * 2 * 4
        row |= {"case": f"attention, {rows} x {queries} queries at {context}", "GB/s": size / row["ours"] / 1e9}
        pairs = queries * (context - queries) + queries * (queries + 1) / 2
        results.append(row | {"GFLOP/s": 4 * LAYERS * rows * HEADS * DIM * pairs / row["ours"] / 1e9})
    return results


class Stack:
    """The decoder of the CPU speed targets with random weights, computed by our ops and by torch's."""

    def __init__(self) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns) / columns**0.5

        self.embedding, self.head = torch.randn(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN)
        self.layers = [
            {
                "qkv": matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                "o": matrix(HIDDEN, HEADS * DIM),
                "gate": matrix(INTERMEDIATE, HIDDEN),
                "up": matrix(INTERMEDIATE, HIDDEN),
                "down": matrix(HIDDEN, INTERMEDIATE),
            }
            for _ in range(LAYERS)
        ]
        self.packed = [
            {
                "qkv": pack_panels(w["qkv"], None),
                "o": pack_panels(w["o"], None),
                "gate_up": pack_paired(torch.stack([w["gate"], w["up"]]), None),
                "down": pack_panels(w["down"], None),
            }
            for w in self.layers
        ]
        self.gate_up = [torch.cat([w["gate"], w["up"]]) for w in self.layers]
        self.packed_head = pack_panels(self.head, None)
        self.norm, self.head_norm = torch.ones(HIDDEN), torch.ones(DIM)
        self.inv_freq = 1e6 ** -(torch.arange(0, DIM, 2) / DIM)

    def ours(self, ids, caches, positions, meta, last):
        cos, sin = cos_sin(positions, self.inv_freq)
        residual = self.embedding[ids]
        for weights, (k_cache, v_cache) in zip(self.packed, caches):
            h = rms_norm(residual, self.norm, 1e-6)
            q = qkv_rope_store(
                weights["qkv"].linear(h),
                cos,
                sin,
                self.head_norm,
                self.head_norm,
                1e-6,
                HEADS,
                KV_HEADS,
                DIM,
                k_cache,
                v_cache,
                meta.slot_mapping,
            )
            weights["o"].linear(paged_attention(q, k_cache, v_cache, meta, DIM**-0.5), residual, residual)
            h = rms_norm(residual, self.norm, 1e-6)
            weights["down"].linear(weights["gate_up"].gated(h, Activation.SILU), residual, residual)
        return self.packed_head.linear(rms_norm(residual, self.norm, 1e-6)[last])

    def torch(self, ids, caches, positions, rows, last):
        """Contiguous caches [rows, kv_heads, context, dim] that already hold all keys but those of this step."""
        angle = positions[: len(ids) // rows, None].float() * self.inv_freq
        cos, sin = angle.cos(), angle.sin()  # [queries, dim / 2]
        queries = len(ids) // rows
        residual = self.embedding[ids]
        for weights, gate_up, (k_cache, v_cache) in zip(self.layers, self.gate_up, caches):
            h = functional.rms_norm(residual, (HIDDEN,), self.norm, 1e-6)
            heads = functional.linear(h, weights["qkv"]).view(rows, queries, -1, DIM).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            q, k = (rotate(functional.rms_norm(x, (DIM,), self.head_norm, 1e-6), cos, sin) for x in (q, k))
            k_cache[:, :, -queries:], v_cache[:, :, -queries:] = k, v
            h = functional.scaled_dot_product_attention(q, k_cache, v_cache, is_causal=queries > 1, enable_gqa=True)
            residual = residual + functional.linear(h.transpose(1, 2).reshape(len(ids), -1), weights["o"])
            h = functional.rms_norm(residual, (HIDDEN,), self.norm, 1e-6)
            gate, up = functional.linear(h, gate_up).chunk(2, -1)
            residual = residual + functional.linear(functional.silu(gate) * up, weights["down"])
        return functional.linear(functional.rms_norm(residual[last], (HIDDEN,), self.norm, 1e-6), self.head)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def bench_stack(rounds: int) -> list[dict]:
    stack, results = Stack(), []
    for rows, context, queries in ((1, 160, 1), (8, 160, 1), (32, 160, 1), (1, 128, 128), (4, 128, 128)):
        caches, positions, meta = paged_case(rows, context, queries)
        theirs = [tuple(torch.randn(rows, KV_HEADS, context, DIM) for _ in range(2)) for _ in range(LAYERS)]
        ids = torch.randint(0, VOCAB, (rows * queries,))
        last = torch.arange(rows) * queries + queries - 1
        row = turns(
            lambda case=(ids, caches, positions, meta, last): stack.ours(*case),
            lambda case=(ids, theirs, positions, rows, last): stack.torch(*case),
            max(2, rounds // (1 + queries // 64)),
        )
        row["case"] = f"stack, {rows} x {queries} tokens at {context}"
        results.append(row | {"tokens/s": rows * queries / row["ours"]})
    return results


def show(row: dict) -> None:
    rates = "  ".join(f"{row[unit]:9.1f} {unit}" for unit in ("GB/s", "GFLOP/s", "tokens/s") if unit in row)
    print(
        f"{row['case']:42s} ours {row['ours'] * 1e3:8.3f} ms  {row.get('beside', 'torch')} {row['torch'] * 1e3:8.3f} ms"
        f"  ratio {row['ratio']:5.2f} ({row['ratio_of_medians']:5.2f})  {rates}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="linear,attention,stack")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    cpu.set_num_threads(0)
    torch.set_num_threads(cpu.num_cores())
    torch.manual_seed(0)
    parts = {"linear": bench_linear, "attention": bench_attention, "stack": bench_stack, "codes": bench_codes}
    rows: list[dict] = []
    with torch.inference_mode():
        for name in args.only.split(","):
            found = parts[name](args.rounds)
            for row in found:
                show(row)
            rows += found
    facts = {"machine": platform.processor() or platform.machine(), "isa": cpu.isa(), "threads": cpu.num_threads()}
    if args.json:
        args.json.write_text(json.dumps({**facts, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
