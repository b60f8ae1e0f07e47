"""StateRows: where the states of a step's rows lie, as its StateMetas say it; and which blocks each run has.

Owner: device thread at start, then the stream, in step order. In: columns of a plan's rows, and the blocks of runs that
are new in it. Out: a StateMeta for each group of layers with states, at addresses that never change. On both kinds of
device the numbers of a step come in one copy; rows beyond the step's have runs 0 and no tokens.

    table    [run ids + 1, columns]: run 0 has block 0 alone, to which padded rows write
    numbers  base_run | write_run | tail_run | base | new_base | start | query_start | checkpoint_run | checkpoint_at
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.state_meta import MAX_CHECKPOINTS, StateMeta
from engine.cache.runs import Runs


@dataclass(frozen=True, slots=True)
class StateColumns:
    """A plan's rows; R of them, int32. Runs by id, 0: none."""

    base_run: np.ndarray  # [R]
    write_run: np.ndarray  # [R]
    tail_run: np.ndarray  # [R]
    base: np.ndarray  # [R]
    new_base: np.ndarray  # [R]
    checkpoint_run: np.ndarray  # [MAX_CHECKPOINTS, R]
    checkpoint_at: np.ndarray  # [MAX_CHECKPOINTS, R]


class StateRows:
    """One step's rows at a time, `max_rows` at most."""

    __slots__ = ("_numbers", "_runs", "_table", "_views", "max_rows")

    def __init__(self, runs: Runs, max_rows: int, num_ids: int, device: torch.device | str) -> None:
        """`num_ids`: of runs, from 1 on."""
        self._runs = runs
        self.max_rows = max_rows
        self._table = torch.zeros(num_ids + 1, runs.columns, dtype=torch.int32, device=device)
        sizes = (*(max_rows,) * 6, max_rows + 1, max_rows * MAX_CHECKPOINTS, max_rows * MAX_CHECKPOINTS)
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        *views, runs_of, places = self._numbers.split(sizes)
        self._views = (*views, runs_of.view(max_rows, MAX_CHECKPOINTS), places.view(max_rows, MAX_CHECKPOINTS))

    def set_runs(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """The blocks of runs, in their order; what lies behind a run's last block in a line of the plan is 0."""
        if not blocks:
            return
        lines = np.zeros((len(blocks), self._runs.columns), np.int32)
        for line, listed in zip(lines, blocks.values()):
            own = [block for block in listed if block]
            line[self._runs.columns_of(len(own))] = own
        ids = torch.tensor(list(blocks), dtype=torch.int64, device=self._table.device)
        assert 0 < min(blocks) <= max(blocks) < len(self._table), "run 0 has the dummy block"
        self._table.index_copy_(0, ids, torch.from_numpy(lines).to(self._table.device))

    def fill(self, rows: StateColumns, start: np.ndarray, query_start: np.ndarray) -> None:
        """Writes a step's rows. `start` [R]: positions of their first tokens; `query_start` [R + 1]: their places."""
        count = len(rows.base)
        assert count <= self.max_rows, "a step has no more rows"
        padded = np.zeros((6, self.max_rows), np.int32)
        given = (rows.base_run, rows.write_run, rows.tail_run, rows.base, rows.new_base, start)
        for line, column in zip(padded, given, strict=True):
            line[:count] = column
        offsets = np.full(self.max_rows + 1, query_start[-1], np.int32)
        offsets[: count + 1] = query_start
        checkpoints = np.zeros((2, self.max_rows, MAX_CHECKPOINTS), np.int32)
        checkpoints[:, :count] = np.stack([rows.checkpoint_run.T, rows.checkpoint_at.T])
        numbers = np.concatenate([padded.reshape(-1), offsets, checkpoints.reshape(-1)])
        self._numbers.copy_(torch.from_numpy(numbers))  # pageable: it has been read when this returns

    def metas(self, rows: int, num_rows: Tensor | None = None, decode_only: bool = False) -> list[StateMeta]:
        """By group of layers with states: views of the first `rows` rows. `num_rows`, `decode_only`: as StateMeta's."""
        base_run, write_run, tail_run, base, new_base, start, query_start, checkpoint_run, at = self._views
        return [
            StateMeta(
                runs=self._table[:, group.first_column : group.first_column + group.columns],
                base_run=base_run[:rows],
                write_run=write_run[:rows],
                tail_run=tail_run[:rows],
                base=base[:rows],
                new_base=new_base[:rows],
                query_start=query_start[: rows + 1],
                start=start[:rows],
                checkpoint_run=checkpoint_run[:rows],
                checkpoint_at=at[:rows],
                num_rows=num_rows,
                decode_only=decode_only,
            )
            for group in self._runs.groups
        ]
