"""Makes batches for one step: decoding rows, or prompts. Their metadata is as a scheduler's (engine/step); all token
ids are 0.

Thread: any. In: the model, its cache layout, the device. Out: a Batch with its own cache. On an accelerator only
the numbers of rows and tokens decide which kernels are launched, so the work lists stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.meta import AttentionMeta, WorkList
from engine.attention.state_meta import MAX_CHECKPOINTS, StateMeta
from engine.cache.layout import CacheLayout
from engine.cache.runs import Runs
from engine.cache.spec import KeyValueSpec
from engine.kernels.attention.tiles import has_large_tiles
from engine.kernels.attention.work import PARTS_OF_CODES, PARTS_PER_UNIT, empty_list, max_parts
from engine.kernels.target import target
from engine.layers.batch import Batch
from engine.models.base.model import Model

SEEN = 64  # context of a decoding row in tokens, including the row's own token


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step; all rows are equal."""

    count: int
    tokens: int  # tokens per row
    context: int  # cached tokens per row after the step

    @property
    def total(self) -> int:
        return self.count * self.tokens


def decoding(count: int) -> Rows:
    """`count` rows that decode one token each."""
    return Rows(count, 1, SEEN)


def prompts(tokens: int, longest: int) -> Rows:
    """`tokens` tokens as one prompt, or as several equal prompts if the model's context is shorter."""
    count = -(-tokens // longest)
    return Rows(count, tokens // count, tokens // count)


def batch_of(model: Model, layout: CacheLayout, rows: Rows, device: str, invariant: bool) -> Batch:
    """The batch of these rows; blocks are assigned consecutively from block 1 on."""
    size = layout.block_size
    blocks, decode_only = -(-rows.context // size), rows.tokens == 1 and device != "cpu" and not invariant
    of_states = 0 if layout.runs is None else rows.count * layout.runs.row_blocks
    caches = layout.allocate(1 + rows.count * blocks + of_states, poison=False, device=device)
    tables = 1 + torch.arange(rows.count * blocks, dtype=torch.int32, device=device).view(rows.count, blocks)
    start = torch.arange(rows.count + 1, dtype=torch.int32, device=device) * rows.tokens
    first = rows.context - rows.tokens
    positions = torch.arange(first, rows.context, device=device).repeat(rows.count)
    row = torch.arange(rows.count, device=device).repeat_interleave(rows.tokens, output_size=rows.total)
    slots = (1 + row * blocks) * size + positions
    meta: list[Any] = [
        AttentionMeta(
            query_start=start,
            context_len=torch.full((rows.count,), rows.context, dtype=torch.int32, device=device),
            block_tables=tables,
            slot_mapping=slots,
            work=None if device == "cpu" else _work(model, group.spec, rows, size, device),
            table_row=None if device == "cpu" else torch.arange(rows.count, dtype=torch.int32, device=device),
            decode_only=decode_only,
        )
        for group in layout.groups[: layout.token_groups]
    ]
    if layout.runs is not None:
        meta += _states(layout.runs, rows, start, 1 + rows.count * blocks, decode_only)
    axes = model.config.axes
    ends = start[1:].long() - 1
    return Batch(
        token_ids=torch.zeros(rows.total, dtype=torch.int64, device=device),
        positions=positions if axes == 1 else positions.expand(axes, -1).contiguous(),
        media=[],
        attention=meta,
        caches=caches,
        group_of=layout.group_of,
        sample_index=None if decode_only and model.pooler is None else ends,
        num_tokens=None if device == "cpu" else start[-1:],
        second_start=_zeros(rows.count, device) if model.reads_pairs else None,
        pool_start=_zeros(rows.count, device) if pools_part(model) else None,
    )


def pools_part(model: Model) -> bool:
    """Whether pooling may leave out the tokens of an input's prompt."""
    return model.pooler is not None and not model.pooler.config.pools_prompt


def _zeros(count: int, device: str) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _states(runs: Runs, rows: Rows, query_start: Tensor, first_block: int, decode_only: bool) -> list[StateMeta]:
    """Each row has three runs, whose blocks follow those of the tokens: two states and a tail."""
    count, device = rows.count, query_start.device
    table = torch.zeros(1 + 3 * count, runs.columns, dtype=torch.int32, device=device)
    for place, width in ((1, runs.state_blocks), (2, runs.state_blocks), (3, runs.tail_blocks)):
        lines = first_block + torch.arange(count * width, dtype=torch.int32, device=device).view(count, width)
        table[place::3, runs.columns_of(width)] = lines
        first_block += count * width
    begin, chunk = rows.context - rows.tokens, runs.chunk
    base, new_base = begin // chunk * chunk, (rows.context - 1) // chunk * chunk
    if rows.tokens == 1:
        new_base = base
    first = 1 + 3 * torch.arange(count, dtype=torch.int32, device=device)

    def column(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=device)

    none = torch.zeros(count, MAX_CHECKPOINTS, dtype=torch.int32, device=device)
    return [
        StateMeta(
            runs=table[:, group.first_column : group.first_column + group.columns],
            base_run=first if base else column(0),
            write_run=first + 1 if new_base > base else column(0),
            tail_run=first + 2,
            base=column(base),
            new_base=column(new_base),
            query_start=query_start,
            start=column(begin),
            checkpoint_run=none,
            checkpoint_at=none,
            decode_only=decode_only,
        )
        for group in runs.groups
    ]


def _work(model: Model, spec: object, rows: Rows, block_size: int, device: str) -> WorkList | None:
    """Empty work lists for this step; engine/step/backend/device/buffers.py allocates them for all steps."""
    if not isinstance(spec, KeyValueSpec):
        return None
    codes, heads = spec.dtype.itemsize == 1, model.config.text.num_heads
    per_unit = PARTS_OF_CODES if codes else PARTS_PER_UNIT
    large = codes and has_large_tiles(target(), spec.head_dim)
    parts = max_parts(rows.count * rows.context, block_size, rows.count, per_unit)
    work = empty_list(rows.count, rows.total, parts, heads, spec.head_dim, device, per_unit, large)
    for count in (work.num_parts, work.num_tiles, work.num_large_tiles):
        if count is not None:
            count.zero_()
    return work
