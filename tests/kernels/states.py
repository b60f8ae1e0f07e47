"""Random steps of rows with states in pages; the reference computes the states and tails that the rows start from.

Unwritten pages are NaN, so a kernel that reads beyond a row's own data returns NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.delta import DeltaShape, DeltaWeights, StatePages, cut
from engine.kernels.state.places import Part, placed
from engine.kernels.state.selective import SelectiveShape, SelectiveWeights
from engine.kernels.state.ssd import SsdShape, SsdWeights

PAGE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step: its positions, and its base before and after the step."""

    start: int
    end: int
    base: int = 0
    new_base: int = 0  # 0: no new base
    checkpoints: tuple[int, ...] = ()


def drawn_cache(
    parts: tuple[Part, ...], tail: tuple[Part, ...], ring: int, runs: int, page_bytes: int = PAGE_BYTES
) -> tuple[StatePages, Tensor]:
    """Pages of `runs` runs, all bits 1, and block tables [runs + 1, blocks]; run 0 has block 0 everywhere."""
    blocks = max(placed(parts, page_bytes)[1], placed(tail, page_bytes, ring)[1])
    table = torch.zeros(runs + 1, blocks, dtype=torch.int32)
    table[1:] = 1 + torch.randperm(runs * blocks).view(runs, blocks)
    pages = torch.full((1 + runs * blocks, page_bytes), 255, dtype=torch.uint8)
    return cut(pages, parts, tail, ring), table


def meta_of(rows: list[Row], table: Tensor, padding: int = 0, first_run: int = 1) -> StateMeta:
    """The meta of `rows`; row r has 8 runs from first_run + 8 r on: base, tail, write, checkpoints."""
    count = len(rows) + padding
    ids = torch.zeros(count, 8, dtype=torch.int32)
    ids[: len(rows)] = torch.arange(8) + first_run + 8 * torch.arange(len(rows))[:, None]
    numbers = torch.zeros(count, 4, dtype=torch.int32)
    at = torch.zeros(count, 4, dtype=torch.int32)
    for number, row in enumerate(rows):
        numbers[number] = torch.tensor([row.base, max(row.base, row.new_base), row.start, row.end - row.start])
        at[number, : len(row.checkpoints)] = torch.tensor(row.checkpoints, dtype=torch.int32)
        ids[number, 3 + len(row.checkpoints) + 1 :] = 0
    base, new_base, start, lens = (column.contiguous() for column in numbers.unbind(1))
    query_start = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    base_run, tail_run, write_run = (ids[:, column].contiguous() for column in range(3))
    base_run[base == 0] = 0
    write_run[new_base == base] = 0
    held = ids[:, 3:7].clone()
    held[at == 0] = 0
    return StateMeta(
        table, base_run, write_run, tail_run, base, new_base, query_start, start, held, at,
    )  # fmt: skip


def history(rows: list[Row], meta: StateMeta) -> StateMeta:
    """The step before `rows`: it computes each row from an empty state up to the row's start."""
    lens = torch.tensor([row.start for row in rows] + [0] * (len(meta.base) - len(rows)))
    query_start = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    nothing = torch.zeros_like(meta.base)
    return replace(
        meta, base_run=nothing, write_run=meta.base_run, base=nothing, new_base=meta.base, start=nothing,
        query_start=query_start, checkpoint_run=torch.zeros_like(meta.checkpoint_run),
        checkpoint_at=torch.zeros_like(meta.checkpoint_at),
    )  # fmt: skip


def delta_weights(shape: DeltaShape, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    """Random weights; gates exp(g) of a token range from 1 - 1e-6 to e^-20."""
    heads = shape.value_heads
    bias = torch.linspace(-12, 3, shape.gate_width)
    return DeltaWeights(
        torch.randn(shape.taps, shape.conv_width, dtype=dtype),
        torch.linspace(-1, 2, heads).to(dtype),
        bias.to(dtype),
        torch.rand(shape.value_dim, dtype=dtype) + 0.5,
    )


def ssd_weights(shape: SsdShape) -> SsdWeights:
    """Random weights; time steps range from e^-12 to 3."""
    heads = shape.heads
    norm = None if shape.norm in ("none", "bare") else torch.rand(shape.inner) + 0.5
    return SsdWeights(
        torch.randn(shape.taps, shape.conv_width), torch.randn(shape.conv_width), torch.linspace(-1, 2, heads),
        torch.linspace(-12, 3, heads), torch.randn(heads), norm,
    )  # fmt: skip


def selective_weights(shape: SelectiveShape) -> SelectiveWeights:
    """Random weights; time steps range as in ssd_weights."""
    inner = shape.inner
    return SelectiveWeights(
        torch.randn(shape.taps, inner), torch.randn(inner), torch.rand(inner, shape.state_size) * 3 - 1,
        torch.linspace(-12, 3, inner), torch.randn(inner),
    )  # fmt: skip


def on(meta: StateMeta, device: str) -> StateMeta:
    """The same step on another device."""
    found = {field.name: getattr(meta, field.name) for field in fields(meta)}
    return replace(meta, **{name: value.to(device) for name, value in found.items() if isinstance(value, Tensor)})
