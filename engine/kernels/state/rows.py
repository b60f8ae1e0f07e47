"""The rows of a step for the references, one by one: positions, blocks, and the runs that a row has to write.

References also serve a CPU for dtypes that the C kernels lack. They compute token by token from the base, with torch's
operations over heads. They read a row's base run and tail before they write, so a ring may be shorter than a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.places import Place


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """One row of a step, with at least one token."""

    tokens: slice  # the row's tokens in the batch
    base: int
    start: int
    end: int
    new_base: int
    has_checkpoints: bool
    base_blocks: Tensor  # blocks of the base run
    tail_blocks: Tensor
    targets: dict[int, list[Tensor]]  # number of tokens after which a state is due -> blocks of its runs

    @property
    def held(self) -> int:
        """Number of positions that the tail holds."""
        return self.start - self.base

    def read_tail(self, pages: Tensor, place: Place, ring: int) -> Tensor:
        """Reads the ring's rows of the positions base..start - 1: [start - base, rows * width]."""
        found = [
            place.read(pages, self.tail_blocks, position % ring * place.rows, place.rows).flatten()
            for position in range(self.base, self.start)
        ]
        return torch.stack(found) if found else torch.empty(0, place.rows * place.width, dtype=place.dtype)

    def write_tail(self, pages: Tensor, place: Place, ring: int, values: Tensor) -> None:
        """Writes values [tokens, rows * width] into the ring; of a long row, only positions after the new base."""
        short = self.end - self.base <= ring and not self.has_checkpoints
        for position in range(self.start if short else max(self.start, self.new_base, self.end - ring), self.end):
            rows = values[position - self.start].view(place.rows, place.width)
            place.write(pages, self.tail_blocks, rows, position % ring * place.rows)


def step_rows(meta: StateMeta) -> Iterator[StepRow]:
    """Yields the rows that have tokens, in order."""
    bounds, start, base = meta.query_start.tolist(), meta.start.tolist(), meta.base.tolist()
    runs = torch.stack([meta.base_run, meta.tail_run, meta.write_run], 1).tolist()
    behind, places, positions = meta.new_base.tolist(), meta.checkpoint_run.tolist(), meta.checkpoint_at.tolist()
    for row, (base_run, tail_run, write_run) in enumerate(runs):
        first, last = bounds[row], bounds[row + 1]
        if first == last:
            continue
        targets: dict[int, list[Tensor]] = {}
        for run, at in zip([write_run, *places[row]], [behind[row], *positions[row]]):
            if run and at > base[row]:
                targets.setdefault(at, []).append(meta.runs[run])
        end = start[row] + last - first
        base_blocks, tail_blocks, checked = meta.runs[base_run], meta.runs[tail_run], places[row][0] > 0
        numbers = base[row], start[row], end, behind[row]
        yield StepRow(slice(first, last), *numbers, checked, base_blocks, tail_blocks, targets)


def by_token(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Calls `function` per token: torch computes a tensor's last elements unlike the others, so bits could differ."""
    return torch.stack([function(*each) for each in zip(*values)])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64 inputs (tests), otherwise float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
