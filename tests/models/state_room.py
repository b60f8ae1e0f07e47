"""Pages and runs of a layer with a state, for tests that plan rows themselves; each row has three runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.places import placed

PAGE_BYTES = 2048


@dataclass
class Held:
    """The state of a row's runs, the same in every layer."""

    number: int  # the row's number; its runs are 1 + 3 * number and the next two
    base: int = 0
    turned: bool = False  # True: the second run has the base, and the first gets the next base

    def planned(self, start: int, end: int, chunk: int) -> list[int]:
        """Base run, write run, tail run, base, new base and start of a step; all its tokens are final."""
        first = 1 + 3 * self.number
        new_base = max(self.base, (end - 1) // chunk * chunk)
        writes = new_base > self.base
        base_run, other = (first + 1, first) if self.turned else (first, first + 1)
        found = [base_run if self.base else 0, other if writes else 0, first + 2, self.base, new_base, start]
        self.base, self.turned = new_base, self.turned ^ writes
        return found


class StateRoom:
    """Pages and block tables of one layer; blocks are shuffled, unwritten pages are NaN."""

    def __init__(self, mixer: Any, dtype: torch.dtype, num_rows: int, seed: int) -> None:
        parts, tail = mixer.shape.parts(dtype, mixer.form.dtype)
        blocks = max(placed(parts, PAGE_BYTES)[1], placed(tail, PAGE_BYTES, mixer.form.ring)[1])
        count = 3 * num_rows
        order = torch.randperm(count * blocks, generator=torch.Generator().manual_seed(seed))
        self.table = torch.zeros(1 + count, blocks, dtype=torch.int32)
        self.table[1:] = 1 + order.view(count, blocks)
        self.pages = torch.full((1 + count * blocks, PAGE_BYTES), 255, dtype=torch.uint8)

    def meta(self, planned: list[list[int]], query_start: Tensor) -> StateMeta:
        """The meta of rows; `planned`: results of Held.planned."""
        none = torch.zeros(len(planned), 4, dtype=torch.int32)
        columns = torch.tensor(planned, dtype=torch.int32).t().contiguous()
        base_run, write_run, tail_run, base, new_base, start = columns.unbind()
        return StateMeta(self.table, base_run, write_run, tail_run, base, new_base, query_start, start, none, none)
