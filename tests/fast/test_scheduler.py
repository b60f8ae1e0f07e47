"""Scheduler: single behaviours on small numbers. The random walks are in test_scheduler_walk.py."""

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

SAMPLE, FEED = 1, 2
STOP, STOP_TOKEN, LENGTH, ERROR = 1, 2, 3, 5


def make(**changes):
    values = {"max_slots": 8, "max_rows": 4, "max_tokens": 32, "max_model_len": 256, "num_blocks": 64, "block_size": 4}
    return Scheduler(**{**values, **changes})


def plan_for(scheduler):
    return StepPlan(scheduler.max_rows, scheduler.max_tokens, 4 * scheduler.max_model_len)


def ids(*values):
    return np.array(values, dtype=np.int32)


def rows(plan):
    return {
        int(plan.row_slot[r]): (int(plan.row_computed[r]), int(plan.row_len[r]), int(plan.row_flags[r]))
        for r in range(plan.num_rows)
    }


def step(scheduler, token=7):
    """One whole step: planned and settled."""
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    scheduler.commit(plan, np.full(max(1, plan.num_rows), token, np.int32))
    return plan


def test_a_prompt_becomes_tokens_until_its_length_is_reached():
    scheduler = make()
    slot = scheduler.add(5, ids(1, 2, 3), max_tokens=2)
    first = step(scheduler)
    assert rows(first) == {slot: (0, 3, SAMPLE)}
    assert list(first.token_ids[:3]) == [1, 2, 3]
    second = step(scheduler)
    assert rows(second) == {slot: (3, 1, SAMPLE)}
    assert (second.out_token[0], second.out_finish[0], second.out_request[0]) == (7, LENGTH, 5)
    assert list(scheduler.freed_slots[: scheduler.num_freed]) == [slot]
    assert scheduler.ledger()["used"] == scheduler.ledger()["slots"] == 0


def test_a_step_is_planned_before_the_one_in_flight_is_settled():
    scheduler = make()
    slot = scheduler.add(1, ids(1, 2), max_tokens=8, eos_ids=[7])
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.schedule(two)
    assert rows(two) == {slot: (2, 1, SAMPLE | FEED)}
    assert two.token_ids[0] == -1
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule(plan_for(scheduler))
    scheduler.commit(one, ids(7))
    assert one.out_finish[0] == STOP
    assert scheduler.num_freed == 0
    scheduler.commit(two, ids(9))
    assert (two.out_token[0], two.out_finish[0]) == (-1, 0)
    assert list(scheduler.freed_slots[: scheduler.num_freed]) == [slot]


def test_what_never_fits_is_refused_when_it_is_added():
    scheduler = make(num_blocks=5, encoder_capacity=8)
    assert scheduler.add(1, ids(*range(20)), max_tokens=4) == -2
    assert scheduler.add(1, ids(*range(10)), max_tokens=7) == 0
    assert scheduler.add_entry(9) == -3
    with pytest.raises(ValueError, match="prompt of 256 tokens"):
        scheduler.add(1, ids(*range(256)), max_tokens=1)
