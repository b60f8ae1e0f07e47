"""Reads the runs of a step's rows from the step's record, for layers with states; step_inputs reads the rest.

In: the next record in the host's pinned memory (layout in `_fast/layout.py`): columns of states, and the blocks of new
runs. Out: StateTables at fixed addresses; rows after the step's last row have run 0 and base 0. The single launch must
come before step_inputs, because step_inputs moves on to the next record. In steps with runs of tokens a fed row begins
at its slot's newest token (kernels/fed_rows), so a fold never takes more than the record names:

    program 0   all rows in parallel              other programs   new runs, one after the other

A CPU runs the reference, with the same results. Users: engine/step/backend/states; thread: the stream's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from _fast.layout import (
    CHECKPOINTS,
    STATE_COLUMNS,
    Header,
    RowColumn,
    RowFlag,
    SlotWord,
    StateColumn,
    column_at,
    new_runs,
    runs_at,
    states_at,
)
from engine.kernels.pdl import grid_wait, launch_options
from engine.kernels.record import Records
from engine.kernels.step_tensors import SlotTensors, word
from engine.kernels.target import tl, triton

NUM_ROWS = tl.constexpr(int(Header.NUM_ROWS))
NUM_RUNS = tl.constexpr(int(Header.NUM_RUNS))
PASSING = tl.constexpr(CHECKPOINTS)
BASE_RUN, WRITE_RUN, TAIL_RUN, BASE, NEW_BASE, RUN, AT = (tl.constexpr(int(one)) for one in StateColumn)
SLOT, _, _, COMPUTED, FLAGS = (tl.constexpr(int(one)) for one in RowColumn)
FEED = tl.constexpr(int(RowFlag.FEED))
LENGTH = tl.constexpr(int(SlotWord.LENGTH))
LOADERS = 8  # programs that write the blocks of new runs


@dataclass(frozen=True, slots=True, eq=False)
class StateTables:
    """Block tables of all runs, and one step's rows; R = max_rows. All int32."""

    table: Tensor  # [run ids, columns]: a run's blocks, in the columns for states or tails; run 0: block 0 everywhere
    rows: Tensor  # [6, R]: base run, write run, tail run, base, new base, start
    checkpoints: Tensor  # [2, R, CHECKPOINTS]: runs, and the numbers of tokens after which their states are due
    places: Tensor  # [2, run width]: columns of a state's blocks, and columns of a tail's blocks
    state_blocks: int  # blocks of a state's run; a tail's run has another number

    @property
    def max_rows(self) -> int:
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """Sizes of the plan, which set the layout of a record."""

    max_rows: int
    max_tokens: int
    max_updates: int

    @property
    def states_at(self) -> int:
        """Offset of the columns of states in a record."""
        return states_at(self.max_rows, self.max_tokens, self.max_updates)

    @property
    def runs_at(self) -> int:
        """Offset of the new runs in a record."""
        return runs_at(self.max_rows, self.max_tokens, self.max_updates)


@triton.jit
def state_inputs_kernel(
    table,  # [num_ids, columns]
    rows,  # [6, max_rows]
    checkpoints,  # [2, max_rows, PASSING]
    places,  # [2, run_width]
    pinned,  # [num_records, capacity], on the host
    turn,  # [1]
    words,  # of SlotTensors; None: a row yields one token, and begins where the record says
    num_records,
    capacity,
    max_rows,
    rows_at,  # offset of the columns of rows
    max_slots,
    states_at,
    runs_at,
    most_runs,
    num_ids,
    columns,
    run_width,
    state_blocks,
    ROWS: tl.constexpr,  # power of two >= max_rows
    WIDTH: tl.constexpr,  # power of two >= run_width
    OVERLAP: tl.constexpr,
):
    """Writes rows (program 0) or new runs; loads bypass the caches, since the host rewrites a record 3 steps later."""
    grid_wait(OVERLAP)
    program = tl.program_id(0)
    mine = tl.minimum(tl.maximum(tl.load(turn), 0), num_records - 1)
    record = pinned + mine.to(tl.int64) * capacity
    if program == 0:
        row = tl.arange(0, ROWS)
        room, line = row < max_rows, record + states_at + row
        base_run = tl.load(line + BASE_RUN * max_rows, mask=room, other=0, cache_modifier=".cv")
        write_run = tl.load(line + WRITE_RUN * max_rows, mask=room, other=0, cache_modifier=".cv")
        tail_run = tl.load(line + TAIL_RUN * max_rows, mask=room, other=0, cache_modifier=".cv")
        base = tl.load(line + BASE * max_rows, mask=room, other=0, cache_modifier=".cv")
        new_base = tl.load(line + NEW_BASE * max_rows, mask=room, other=0, cache_modifier=".cv")
        of_row = record + rows_at + row
        start = tl.load(of_row + COMPUTED * (max_rows + 1), mask=room, other=0, cache_modifier=".cv")
        here = row < tl.load(record + NUM_ROWS, cache_modifier=".cv")
        if words is not None:
            flags = tl.load(of_row + FLAGS * (max_rows + 1), mask=room, other=0, cache_modifier=".cv")
            slot = tl.load(of_row + SLOT * (max_rows + 1), mask=room, other=max_slots, cache_modifier=".cv")
            fed = here & ((flags & FEED) != 0) & (slot >= 0) & (slot < max_slots)
            own = tl.load(word(words, slot, LENGTH), mask=fed, other=0)
            start = tl.where(fed, tl.maximum(own - 1, base), start)
        for place in tl.static_range(PASSING):
            run = tl.load(line + (RUN + place) * max_rows, mask=room, other=0, cache_modifier=".cv")
            at = tl.load(line + (AT + place) * max_rows, mask=room, other=0, cache_modifier=".cv")
            run = tl.where(here & (run > 0) & (run < num_ids), run, 0)
            out = checkpoints + row * PASSING + place
            tl.store(out, run, mask=room)
            tl.store(out + max_rows * PASSING, tl.where(run > 0, at, 0), mask=room)
        base = tl.where(here, base, 0)
        tl.store(rows + row, tl.where(here & (base_run < num_ids), base_run, 0), mask=room)
        tl.store(rows + max_rows + row, tl.where(here & (write_run < num_ids), write_run, 0), mask=room)
        tl.store(rows + 2 * max_rows + row, tl.where(here & (tail_run < num_ids), tail_run, 0), mask=room)
        tl.store(rows + 3 * max_rows + row, base, mask=room)
        tl.store(rows + 4 * max_rows + row, tl.maximum(tl.where(here, new_base, 0), base), mask=room)
        tl.store(rows + 5 * max_rows + row, tl.where(here, start, 0), mask=room)
    else:
        number = tl.minimum(tl.load(record + NUM_RUNS, cache_modifier=".cv"), most_runs)
        i = tl.arange(0, WIDTH)
        for each in range(program - 1, number, tl.num_programs(0) - 1):
            line = record + runs_at + each * (run_width + 1)
            run = tl.load(line + tl.zeros([WIDTH], tl.int32), cache_modifier=".cv")
            block = tl.load(line + 1 + i, mask=i < run_width, other=0, cache_modifier=".cv")
            is_tail = tl.sum((block > 0).to(tl.int32), 0) != state_blocks
            column = tl.load(places + is_tail.to(tl.int32) * run_width + i, mask=i < run_width, other=0)
            known = (block > 0) & (run > 0) & (run < num_ids)
            tl.store(table + run.to(tl.int64) * columns + column, block, mask=known)


def state_inputs(tables: StateTables, records: Records, sizes: RecordSizes, slots: SlotTensors | None = None) -> None:
    """Rewrites the rows of `tables` and adds new runs from the next record; leaves `turn` unchanged. Capturable.

    slots: in steps with runs, where rows begin that a step in flight feeds.
    """
    if records.staged.is_cuda:
        launch_state_inputs(tables, records, sizes, slots)
    else:
        state_inputs_reference(tables, records.pinned[int(records.turn)], sizes, slots)


def launch_state_inputs(
    tables: StateTables, records: Records, sizes: RecordSizes, slots: SlotTensors | None = None
) -> None:
    """Launches the Triton kernel; arguments as `state_inputs`."""
    (num_ids, columns), run_width = tables.table.shape, tables.places.shape[1]
    count, capacity = records.pinned.shape
    rows = sizes.max_rows
    assert tables.max_rows == rows, "the tables are of another size"
    state_inputs_kernel[(1 + LOADERS,)](
        tables.table, tables.rows, tables.checkpoints, tables.places, records.pinned, records.turn,
        None if slots is None else slots.words, count, capacity, rows, column_at(RowColumn.SLOT, rows),
        0 if slots is None else len(slots.words) - 1, sizes.states_at, sizes.runs_at, new_runs(rows), num_ids, columns,
        run_width, tables.state_blocks, ROWS=triton.next_power_of_2(rows), WIDTH=triton.next_power_of_2(run_width),
        num_warps=4, **launch_options(),
    )  # fmt: skip


def state_inputs_reference(
    tables: StateTables, record: Tensor, sizes: RecordSizes, slots: SlotTensors | None = None
) -> None:
    """Fills `tables` on a CPU; `record` int32 [capacity] is this step's."""
    most, count = sizes.max_rows, int(record[Header.NUM_ROWS])
    columns = record[sizes.states_at :][: STATE_COLUMNS * most].view(STATE_COLUMNS, most)[:, :count]
    slot, start, flags = (
        record[column_at(one, most) :][:count] for one in (RowColumn.SLOT, RowColumn.COMPUTED, RowColumn.FLAGS)
    )
    if slots is not None:
        own = torch.maximum(slots.word(SlotWord.LENGTH)[slot.long()] - 1, columns[StateColumn.BASE])
        start = torch.where((flags & RowFlag.FEED) > 0, own, start)
    tables.rows.zero_()
    tables.checkpoints.zero_()
    tables.rows[:5, :count] = columns[: StateColumn.CHECKPOINT_RUN]
    tables.rows[4, :count] = torch.maximum(columns[StateColumn.NEW_BASE], columns[StateColumn.BASE])
    tables.rows[5, :count] = start
    runs = columns[StateColumn.CHECKPOINT_RUN : StateColumn.CHECKPOINT_AT]
    tables.checkpoints[0, :count] = runs.T
    tables.checkpoints[1, :count] = torch.where(runs > 0, columns[StateColumn.CHECKPOINT_AT :], 0).T
    width = tables.places.shape[1]
    lines = record[sizes.runs_at :][: int(record[Header.NUM_RUNS]) * (width + 1)].view(-1, width + 1)
    for line in lines:
        known = line[1:] > 0
        is_tail = int(known.sum()) != tables.state_blocks
        tables.table[int(line[0]), tables.places[int(is_tail)][known].long()] = line[1:][known]


def empty_tables(
    max_rows: int, state_columns: list[int], tail_columns: list[int], num_ids: int, device: torch.device | str
) -> StateTables:
    """Tables without runs. num_ids: run ids, dummy run 0 included; *_columns: table columns of a run's blocks."""
    width = max(len(state_columns), len(tail_columns))
    both = [columns + [0] * (width - len(columns)) for columns in (state_columns, tail_columns)]
    sizes = (num_ids, 1 + max(state_columns + tail_columns)), (6, max_rows), (2, max_rows, CHECKPOINTS)
    table, rows, checkpoints = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
    places = torch.tensor(both, dtype=torch.int32, device=device)
    return StateTables(table, rows, checkpoints, places, len(state_columns))
