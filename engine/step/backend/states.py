"""StateRows: the locations of the recurrent states of a step's rows, as StateMetas for the layers.

Owner: device thread at start, then the stream, in step order. In: the record of a plan. Out: a StateMeta for each group
of layers with states, at fixed addresses (kernels/state_inputs).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from _fast.blocks import num_run_ids
from _fast.plan import StepPlan
from engine.attention.state_meta import MAX_CHECKPOINTS, StateMeta, StateWork
from engine.cache.layout import CacheLayout
from engine.cache.runs import Runs
from engine.kernels.record import Records
from engine.kernels.state_inputs import RecordSizes, empty_tables, state_inputs, state_inputs_reference
from engine.kernels.step_tensors import SlotTensors
from engine.step.sizes import Sizes


class StateRows:
    """The state tables for the rows of the current step."""

    __slots__ = ("_max_slots", "_runs", "_sizes", "_width", "tables")

    def __init__(self, runs: Runs, sizes: Sizes, plan: StepPlan, num_blocks: int, device: torch.device | str) -> None:
        """`plan`: any plan of the backend, for its sizes; `num_blocks`: blocks of the KV cache with the dummy block."""
        self._runs, self._max_slots, self._width = runs, sizes.max_slots, sizes.width
        self._sizes = RecordSizes(plan.max_rows, plan.max_tokens, plan.max_updates)
        states, tails = (runs.columns_of(count) for count in (runs.state_blocks, runs.tail_blocks))
        self.tables = empty_tables(sizes.max_rows, states, tails, self._num_ids(num_blocks), device)

    def _num_ids(self, num_blocks: int) -> int:
        return num_run_ids(num_blocks, self._runs.state_blocks, self._runs.tail_blocks, self._max_slots)

    def set_blocks(self, num_blocks: int) -> None:
        """Allocates an empty table for all runs of a cache of so many blocks."""
        old = self.tables.table
        table = torch.zeros(self._num_ids(num_blocks), old.shape[1], dtype=torch.int32, device=old.device)
        self.tables = replace(self.tables, table=table)

    def read(self, plan: StepPlan, slots: SlotTensors) -> None:
        """Reads a step's rows and new runs from the plan's record, on the host."""
        record = torch.from_numpy(np.asarray(plan.record))
        state_inputs_reference(self.tables, record, self._sizes, slots if self._width > 1 else None)

    def launch(self, records: Records, slots: SlotTensors) -> None:
        """Launches the kernel that reads the next record in the same way, on the device."""
        state_inputs(self.tables, records, self._sizes, slots if self._width > 1 else None)

    def metas(self, query_start: Tensor, decode_only: bool = False) -> list[StateMeta]:
        """A StateMeta per group of layers with states; `query_start` int32 [rows + 1]; `decode_only`: see StateMeta."""
        count = len(query_start) - 1
        base_run, write_run, tail_run, base, new_base, start = self.tables.rows[:, :count].unbind()
        checkpoint_run, checkpoint_at = self.tables.checkpoints[:, :count].unbind()
        assert checkpoint_run.shape[1] == MAX_CHECKPOINTS
        works: dict[int, StateWork] = {}  # shared by all groups
        return [
            StateMeta(
                runs=self.tables.table[:, group.first_column : group.first_column + group.columns],
                base_run=base_run,
                write_run=write_run,
                tail_run=tail_run,
                base=base,
                new_base=new_base,
                query_start=query_start,
                start=start,
                checkpoint_run=checkpoint_run,
                checkpoint_at=checkpoint_at,
                works=works,
                decode_only=decode_only,
            )
            for group in self._runs.groups
        ]


def state_rows(
    layout: CacheLayout, sizes: Sizes, plan: StepPlan, num_blocks: int, device: torch.device | str
) -> StateRows | None:
    """The StateRows of a backend; None: no layer has a state."""
    return None if layout.runs is None else StateRows(layout.runs, sizes, plan, num_blocks, device)
