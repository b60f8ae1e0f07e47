"""Runs one sequence through a recurrent layer in steps, with runs, bases and folds as a scheduler plans them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.attention.state_meta import StateMeta
from engine.kernels.state.places import Part, placed

PAGE_BYTES = 4096
Call = Callable[[Tensor, StateMeta, Tensor], Tensor]  # (inputs of the step's tokens, meta, pages) -> outputs


class Sequence:
    """A row without other rows in its steps; unwritten pages are NaN."""

    def __init__(
        self,
        call: Call,
        parts: tuple[Part, ...],
        tail: tuple[Part, ...],
        chunk: int,
        ring: int,
        device: str = "cpu",
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.call, self.chunk, self.ring = call, chunk, ring
        blocks = max(placed(parts, page_bytes)[1], placed(tail, page_bytes, ring)[1])
        self.table = torch.zeros(4, blocks, dtype=torch.int32)
        self.table[1:] = 1 + torch.randperm(3 * blocks).view(3, blocks)
        self.pages = torch.full((1 + 3 * blocks, page_bytes), 255, dtype=torch.uint8, device=device)
        self.base, self.base_run, self.other_run = 0, 1, 2
        self.device = device

    def step(self, inputs: Tensor, start: int, settled: int) -> Tensor:
        """Computes inputs [tokens, hidden] from position `start` on; `settled`: positions that are final."""
        end = start + len(inputs)
        new_base = max(self.base, min(settled, end - 1) // self.chunk * self.chunk)
        writes = new_base > self.base
        numbers = [self.base_run if self.base else 0, self.other_run * writes, 3, self.base, new_base, start]
        base_run, write_run, tail_run, base, behind, begin = (self.number(each) for each in numbers)
        none = torch.zeros(1, 4, dtype=torch.int32, device=self.device)
        query_start = torch.tensor([0, len(inputs)], dtype=torch.int32, device=self.device)
        meta = StateMeta(
            self.table.to(self.device), base_run, write_run, tail_run, base, behind, query_start, begin, none, none
        )
        found = self.call(inputs, meta, self.pages)
        if writes:
            self.base, self.base_run, self.other_run = new_base, self.other_run, self.base_run
        return found

    def number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def prompt(self, inputs: Tensor, cuts: Iterable[int]) -> Tensor:
        """Outputs of the whole sequence in steps of `cuts` tokens; no token is computed twice."""
        found, start = [], 0
        for size in cuts:
            found.append(self.step(inputs[start : start + size], start, len(inputs)))
            start += len(found[-1])
        return torch.cat(found)

    def drafted(self, inputs: Tensor, drafts: int, generator: torch.Generator) -> Tensor:
        """Outputs of the whole sequence in steps with drafts; a random number is accepted, the others are noise."""
        found, start = [], 0
        while start < len(inputs):
            right = int(torch.randint(0, drafts + 1, (1,), generator=generator))
            step = torch.randn(1 + drafts, inputs.shape[1], generator=generator)
            own = inputs[start : start + 1 + right]
            step[: len(own)] = own
            found.append(self.step(step.to(inputs), start, start)[: len(own)])
            start += len(own)
        return torch.cat(found)


def in_steps(length: int, size: int) -> list[int]:
    return [size] * -(-length // size)
