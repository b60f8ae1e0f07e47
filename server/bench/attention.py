"""bench attention: times the paged attention kernel on a batch, against the machine's copy and product rates and torch.

Owner: main thread. `8x1@4096+2x512` is a batch: eight rows of one query over 4,096 tokens of cache, and two prompts of
512. The floor is the larger of two times: reading the keys and values at the rate of a copy, and computing the products
at the rate of a product; both rates are measured in the same run. The reference is torch's attention without pages.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.attention.meta import AttentionMeta
from engine.kernels.attention.paged import paged_attention
from engine.kernels.attention.work import empty_list, fill_list, max_parts
from server.bench.options import AttentionOptions
from server.bench.output import finish
from server.bench.timing import COLD, chosen_device, rates, time_of

BLOCK = 16
ROWS = re.compile(r"(?:(\d+)x)?(\d+)(?:@(\d+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """`queries` tokens at the end of `context` tokens in the cache."""

    queries: int
    context: int


def read_batch(text: str) -> list[Row]:
    """Parse --batch. Raises ValueError."""
    found = []
    for part in text.split("+"):
        match = ROWS.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"--batch {part!r}: must be rows as 8x1@4096 (8 rows, 1 query, 4096 in the cache) or 2x512"
            )
        count, queries, context = int(match[1] or 1), int(match[2]), int(match[3] or match[2])
        if not count or not queries or context < queries:
            raise ValueError(f"--batch {part!r}: rows and queries are 1 at least, and the cache holds the queries too")
        found += [Row(queries, context)] * count
    return found


def run(options: AttentionOptions) -> int:
    """The command's exit status."""
    try:
        rows = read_batch(options.batch)
        if options.heads % options.kv_heads:
            raise ValueError(f"--heads {options.heads}: must be a multiple of --kv-heads {options.kv_heads}")
        device = chosen_device(options.device)
    except ValueError as error:
        print(f"omniloop: {error}", file=sys.stderr)
        return 2
    with torch.inference_mode():
        return finish(options, measure(options, rows, device))


def measure(options: AttentionOptions, rows: list[Row], device: str) -> dict[str, float]:
    dtype = torch.bfloat16 if device == "cuda" or options.dtype == "bfloat16" else torch.float32
    q, pages, meta = inputs(options, rows, device, dtype)
    scale = options.head_dim**-0.5
    turns = [lambda k=k, v=v: paged_attention(q, k, v, meta, scale) for k, v in pages]
    took = time_of(turns, device)
    copied, multiplied = rates(device, dtype)
    moved = sum(row.context for row in rows) * options.kv_heads * options.head_dim * 2 * dtype.itemsize
    pairs = sum(row.queries * row.context - row.queries * (row.queries - 1) / 2 for row in rows)
    flops = 4 * options.heads * options.head_dim * pairs
    floor = max(moved / copied, flops / multiplied)
    found = {
        "rows": float(len(rows)),
        "queries": float(sum(row.queries for row in rows)),
        "us": took * 1e6,
        "floor_us": floor * 1e6,
        "of_floor": floor / took,
        "gigabytes_per_s": moved / took / 1e9,
        "gigaflops_per_s": flops / took / 1e9,
        "copy_gigabytes_per_s": copied / 1e9,
        "product_gigaflops_per_s": multiplied / 1e9,
    }
    dense = [dense_row(options, row, device, dtype) for row in rows]
    reference = time_of([lambda: [call() for call in dense]], device)
    return found | {"torch_us": reference * 1e6, "torch_over_ours": reference / took}


def inputs(
    options: AttentionOptions, rows: list[Row], device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]], AttentionMeta]:
    """Random queries and pages with shuffled blocks; on an accelerator, more pages than caches of the chip hold."""
    counts = [-(-row.context // BLOCK) for row in rows]
    order = torch.randperm(sum(counts)).to(torch.int32)
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    used = 0
    for at, count in enumerate(counts):
        tables[at, :count] = order[used : used + count]
        used += count
    queries = [row.queries for row in rows]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(device)
    lengths = torch.tensor([row.context for row in rows], dtype=torch.int32).to(device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    meta = AttentionMeta(starts, lengths, tables.to(device), none, decode_only=max(queries) == 1)
    if device == "cuda":
        room = max_parts(len(order), BLOCK, len(rows))
        work = empty_list(len(rows), sum(queries), room, options.heads, options.head_dim, device)
        fill_list(work, meta, options.heads // options.kv_heads)
        meta = replace(meta, work=work)
    shape = (len(order), 2, options.kv_heads, BLOCK, options.head_dim)
    sets = min(16, -(-COLD // (math.prod(shape) * dtype.itemsize))) if device == "cuda" else 1
    pages = [torch.randn(shape, device=device, dtype=dtype).unbind(1) for _ in range(sets)]
    return torch.randn(sum(queries), options.heads, options.head_dim, device=device, dtype=dtype), pages, meta


def dense_row(options: AttentionOptions, row: Row, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A call of torch's attention over one row."""
    q = torch.randn(1, options.heads, row.queries, options.head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, options.kv_heads, row.context, options.head_dim, device=device, dtype=dtype)
    mask = torch.ones(row.queries, row.context, dtype=torch.bool, device=device).tril(row.context - row.queries)
    whole = row.queries == row.context
    given = {"is_causal": True} if whole else {"attn_mask": mask} if row.queries > 1 else {}
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)
