"""Scheduler at the edges of what it is given: block-table changes that exceed a plan, pools of the least size."""

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler


def step(scheduler, plan, token=7):
    scheduler.schedule(plan)
    scheduler.commit(plan, np.full(max(1, plan.num_rows), token, np.int32))
    return plan.num_rows


def tiny(**changes):
    values = {"max_slots": 8, "max_rows": 4, "max_tokens": 900, "max_model_len": 256, "num_blocks": 2000}
    return Scheduler(**{**values, "block_size": 1, **changes})


def test_rows_whose_changes_do_not_fit_start_in_later_steps():
    scheduler, plan = tiny(), StepPlan(4, 900, 256)
    prompt = np.arange(200, dtype=np.int32)
    scheduler.add(0, prompt, max_tokens=1)
    step(scheduler, plan)
    for number in (1, 2, 3):
        scheduler.add(number, prompt, max_tokens=30)
    started = []
    for _ in range(3):
        started.append(step(scheduler, plan))
        assert plan.num_updates <= 256
    assert started == [1, 2, 3]


def test_running_rows_whose_changes_do_not_fit_wait_a_step():
    scheduler, plan, wide = tiny(), StepPlan(4, 900, 256), StepPlan(4, 900, 900)
    prompt = np.arange(200, dtype=np.int32)
    slots = [scheduler.add(number, prompt, max_tokens=30) for number in (1, 2, 3)]
    assert step(scheduler, wide) == 3
    # Equal prompts now share the first row's blocks: the other two must send their whole tables again.
    assert step(scheduler, plan) == 2
    assert plan.num_updates <= 256
    assert step(scheduler, plan) == 3
    assert len({tuple(scheduler.tables.row(slot)[:200]) for slot in slots}) == 1


@pytest.mark.parametrize("groups", [[(0, 0)], [(1, 5)], [(1, 17), (0, 0)], [(1, 1)]])
@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("size", [1, 4])
def test_a_request_that_is_accepted_fits_alone_without_a_preemption(groups, chunk, size):
    prompt = np.arange(90, dtype=np.int32)
    for blocks in range(2, 400):
        scheduler = tiny(num_blocks=blocks, groups=groups, max_chunk=chunk, block_size=size, max_tokens=40)
        if scheduler.add(1, prompt, max_tokens=40) >= 0:
            break
    plans = [StepPlan(4, 40, 256 * len(groups)) for _ in range(2)]
    rows, turn = scheduler.schedule(plans[0]), 0
    while rows:
        turn += 1
        rows = scheduler.schedule(plans[turn % 2])
        scheduler.commit(plans[1 - turn % 2], np.full(4, 7, np.int32))
        if not rows and scheduler.num_in_flight == 0:
            rows = scheduler.schedule(plans[turn % 2])
    assert scheduler.num_preemptions == 0
    assert scheduler.ledger()["slots"] == scheduler.ledger()["used"] == 0
