"""state_inputs fills tables with the runs and rows that a real scheduler has planned."""

import numpy as np
import torch

from _fast.layout import StateColumn
from engine.kernels.state_inputs import state_inputs_reference
from tests.kernels.state_plans import MAX_ROWS, STATES, TAILS, StatePlans


def test_tables_have_the_columns_of_the_plan_and_the_blocks_of_its_runs():
    walk = StatePlans(3)
    tables, checked = walk.tables(), [0, 0, 0]
    for plan in walk.steps(60):
        state_inputs_reference(tables, torch.from_numpy(walk.record), walk.sizes)
        count, columns = plan.num_rows, np.asarray(plan.states)[:, : plan.num_rows]
        names = (StateColumn.BASE_RUN, StateColumn.WRITE_RUN, StateColumn.TAIL_RUN, StateColumn.BASE)
        assert tables.rows[:4, :count].tolist() == columns[list(names)].tolist()
        later = np.maximum(columns[StateColumn.NEW_BASE], columns[StateColumn.BASE])
        assert tables.rows[4, :count].tolist() == later.tolist()
        assert tables.rows[5, :count].tolist() == np.asarray(plan.row_computed)[:count].tolist()
        runs, at = tables.checkpoints[:, :count]
        assert runs.T.tolist() == columns[StateColumn.CHECKPOINT_RUN : StateColumn.CHECKPOINT_AT].tolist()
        assert (at > 0).equal(runs > 0)
        assert tables.rows[:, count:].count_nonzero() == tables.checkpoints[:, count:].count_nonzero() == 0
        for run, blocks in plan.new_runs.items():
            own = [block for block in blocks if block]
            places = STATES if len(own) == len(STATES) else TAILS
            assert tables.table[run, places].tolist() == own
            checked[len(own) == len(STATES)] += 1
        checked[2] += int(runs.count_nonzero())
        assert count <= MAX_ROWS
    assert min(checked) > 3, "tails, states and checkpoints"


def test_only_steps_with_chunks_need_the_graphs_that_scan():
    walk, seen = StatePlans(3), set()
    walk.scheduler.states.scan_in(4)
    for plan in walk.steps(60):
        chunked = bool((np.asarray(plan.row_len)[: plan.num_rows] > 1).any())
        assert plan.variant == 4 * chunked
        seen.add(chunked)
    assert seen == {True, False}
