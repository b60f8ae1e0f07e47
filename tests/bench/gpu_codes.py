"""Attention over an 8-bit KV cache, for gpu_kernels: store, decode and prompts, with bfloat16 in the same run.

Shapes of Qwen3-8B, as in gpu_kernels; codes are random bits with random scales. The "bf16" cases repeat a step over
bfloat16 pages, so that one table has both sides of a ratio. Variants of the code cases (attention_variants) follow;
their results must agree. QUANTIZATION.md section 8 requires 0.56 of bfloat16's time for decode, 1.05 for prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.attention.meta import AttentionMeta
from engine.cache.tokens import FullSpec
from engine.kernels.attention.paged import paged_attention
from engine.kernels.attention.work import PARTS_OF_CODES, empty_list, fill_list, max_parts
from engine.kernels.pages import pages_of
from engine.kernels.rotate import qkv_rope_store
from tests.bench import attention_variants

TimeOf = Callable[[list[Callable[[], object]]], tuple[float, float, float]]
Step = Callable[[list[int], list[int]], tuple[torch.Tensor, list, AttentionMeta]]
HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8 e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}


def pages(kind: str, count: int) -> tuple:
    """(keys, values, scales) with random numbers."""
    spec = FullSpec(KV_HEADS, DIM, DTYPES[kind])
    keys, values, scales = pages_of(
        spec.views(torch.zeros(count, spec.block_bytes(16), device="cuda", dtype=torch.uint8), 16)
    )
    for numbers in (keys, values):
        if numbers.dtype is torch.bfloat16:
            numbers.copy_(torch.randn(numbers.shape, device="cuda"))
        else:
            most = 0x40 if kind == "fp8 e5m2" else 0x60  # code bits whose value is below 2; e5m2 has no scales
            numbers.view(torch.uint8).copy_(torch.randint(0, most, numbers.shape, device="cuda"))
    for scale in scales or ():
        scale.copy_(torch.exp2(torch.randint(-14, -7, scale.shape, device="cuda").float()))
    return keys, values, scales


def bytes_of(kind: str, tokens: int) -> int:
    return tokens * FullSpec(KV_HEADS, DIM, DTYPES[kind]).block_bytes(1)


def attention(time_of: TimeOf, step: Step, name: str, contexts: list[int], queries: list[int]) -> list[dict]:
    q, caches, meta = step(contexts, queries)
    blocks, copies = len(caches[0][0]), len(caches)
    del caches
    flops = sum(4 * HEADS * DIM * (n * c - n * (n - 1) / 2) for n, c in zip(queries, contexts))
    found, decodes = [], max(queries) == 1
    for kind in DTYPES:
        sets = [pages(kind, blocks) for _ in range(copies)]
        calls = over(q, sets, cut_for(kind, meta))
        want = calls[0]().float()
        case = {"name": f"{name} {kind}", "bytes": bytes_of(kind, sum(contexts)), "flops": flops}
        found.append(case | {"times": time_of(calls)})
        for said in (attention_variants.DECODES if decodes else attention_variants.PROMPTS).get(kind, []):
            with attention_variants.parts_of(said) if decodes else attention_variants.tiles_of(said) as parts:
                calls = over(q, sets, cut_anew(meta, parts or PARTS_OF_CODES))
                error = float((calls[0]().float() - want).norm() / want.norm())
                took = time_of(calls)
            said = said if error < 4e-3 else f"{said}: OFF BY {error:.1e}"
            found.append(case | {"name": f"{name} {kind} {said}", "times": took})
    return found


def over(q: torch.Tensor, sets: list[tuple], meta: AttentionMeta) -> list[Callable[[], torch.Tensor]]:
    """One call for each set of pages."""
    return [lambda c=c: paged_attention(q, c[0], c[1], meta, DIM**-0.5, scales=c[2]) for c in sets]


def cut_for(kind: str, meta: AttentionMeta) -> AttentionMeta:
    """The metadata with the work list of a step over pages of this kind."""
    return meta if kind == "bf16" else cut_anew(meta, PARTS_OF_CODES)


def cut_anew(meta: AttentionMeta, per_unit: int) -> AttentionMeta:
    """The metadata with a work list of `per_unit` parts per multiprocessor."""
    assert meta.work is not None
    rows, tokens = meta.work.max_rows, len(meta.work.tiles)
    work = empty_list(rows, tokens, max_parts(1 << 16, 16, rows, per_unit), HEADS, DIM, "cuda", per_unit, large=True)
    fill_list(work, meta, HEADS // KV_HEADS)
    return replace(meta, work=work)


def store(time_of: TimeOf, count: int) -> list[dict]:
    width = (HEADS + 2 * KV_HEADS) * DIM
    inputs = [torch.randn(count, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    cos, norm = torch.randn(count, DIM // 2, device="cuda"), torch.randn(DIM, device="cuda")
    slots = torch.randperm(4096 * 16, device="cuda")[:count]
    found = []
    for kind in DTYPES:
        k, v, scales = pages(kind, 4096)
        args = (cos, cos, norm, norm, 1e-6, HEADS, KV_HEADS, DIM, k, v, slots)
        took = time_of([lambda x=x, args=args, scales=scales: qkv_rope_store(x, *args, scales=scales) for x in inputs])
        size = count * (width + HEADS * DIM) * 2 + bytes_of(kind, count)
        found.append({"name": f"store {count} {kind}", "times": took, "bytes": size})
    return found


def code_cases(time_of: TimeOf, step: Step) -> list[Callable[[], list[dict]]]:
    """One group of cases per step."""
    shapes = [
        *(
            (f"decode {rows} x {n}", [n] * rows, [1] * rows)
            for rows, n in ((256, 576), (32, 4096), (1, 32768), (1, 131072))
        ),
        *((f"prefill {n}", [n], [n]) for n in (2048, 8192)),
        ("chunk 512 of 8192", [8192], [512]),
    ]
    return [
        *(lambda shape=shape: attention(time_of, step, *shape) for shape in shapes),
        *(lambda count=count: store(time_of, count) for count in (32, 2048)),
    ]
