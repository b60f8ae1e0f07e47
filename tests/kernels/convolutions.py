"""A random step whose rows have a paged cache of a short convolution's inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta

ROWS = [(0, 1), (40, 1), (0, 5), (2, 1), (1, 9), (17, 3)]  # tokens in the cache, tokens of this step
BLOCK_SIZE = 4


def drawn(
    width: int, dtype: torch.dtype, rows: list[tuple[int, int]], padding: int
) -> tuple[Tensor, Tensor, AttentionMeta]:
    """Random products, pages in shuffled blocks, and metadata; pages are NaN where nothing was written.

    `padding`: number of rows without tokens, and of tokens without rows, at the end.
    """
    lens = torch.tensor([new for _, new in rows] + [0] * padding)
    context = torch.tensor([held + new for held, new in rows] + [0] * padding, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    lines = torch.randperm(len(lens))
    each = -(-int(context.max()) // BLOCK_SIZE)
    tables = torch.randperm(len(rows) * each).add(1).view(len(rows), each).int()
    held = torch.zeros(len(lens), each, dtype=torch.int32)
    held[lines[: len(rows)]] = tables
    pages = torch.full((1 + tables.numel(), BLOCK_SIZE * width + 16), float("nan"), dtype=dtype)
    pages = pages[:, : BLOCK_SIZE * width].unflatten(1, (BLOCK_SIZE, width))
    slots = []
    for table, (before, new) in zip(tables.long(), rows):
        place = torch.arange(before + new)
        place = table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        pages[place[:before] // BLOCK_SIZE, place[:before] % BLOCK_SIZE] = torch.randn(before, width).to(dtype)
        slots.append(place[before:])
    mapping = torch.cat([*slots, torch.full((padding,), -1)])
    projected = torch.randn(len(mapping), 3 * width).to(dtype)
    meta = AttentionMeta(starts, context, held, mapping, table_row=lines.int())
    return projected, pages, meta


def moved(meta: AttentionMeta, device: str) -> AttentionMeta:
    """The same rows on another device."""
    names = ("query_start", "context_len", "block_tables", "slot_mapping", "table_row")
    return replace(meta, **{name: getattr(meta, name).to(device) for name in names})
