"""Scheduler at the limits of its input: block-table changes that exceed a plan, and pools of minimal size."""

import random

import numpy as np
import pytest

from _fast import kinds
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
    for _ in paired_steps(scheduler, 256 * len(groups)):
        pass
    assert scheduler.num_preemptions == 0
    assert scheduler.ledger()["slots"] == scheduler.ledger()["used"] == 0


def paired_steps(scheduler, max_updates):
    """Runs the scheduler's one request with two steps in flight; yields before each plan and after each commit."""
    plans, turn = [StepPlan(4, 40, max_updates) for _ in range(2)], 0
    yield
    rows = scheduler.schedule(plans[0])
    while rows:
        turn += 1
        yield
        rows = scheduler.schedule(plans[turn % 2])
        scheduler.commit(plans[1 - turn % 2], np.full(4, 7, np.int32))
        yield
        if not rows and scheduler.num_in_flight == 0:
            rows = scheduler.schedule(plans[turn % 2])


@pytest.mark.parametrize("window", [0, 1, 9, 40])
def test_a_row_holds_no_more_blocks_than_its_kind_demands(window):
    """Chunks have random lengths; a random part of the prompt comes from the prefix cache."""
    kind = kinds.SLIDING if window else kinds.FULL
    unused = []
    for seed in range(40):
        rng = random.Random(seed)
        size, chunk, length = rng.choice([1, 4, 16]), rng.randrange(1, 41), rng.randrange(60, 200)
        demand = kinds.row_blocks(kind, window, length, size, chunk)
        scheduler = tiny(
            num_blocks=1 + demand, groups=[(kind, window)], block_size=size, max_chunk=chunk, max_tokens=40
        )
        prompt, most = np.arange(length - 20, dtype=np.int32), 0
        for number in range(2):
            prompt = prompt.copy()
            prompt[rng.randrange(len(prompt)) :] += number
            slot = scheduler.add(number, prompt, max_tokens=21)
            for _ in paired_steps(scheduler, 256):
                scheduler.shares.prompt_budget = rng.randrange(1, 41)
                most = max(most, int(np.count_nonzero(scheduler.tables.row(slot))))
        assert scheduler.num_preemptions == 0, (size, chunk, length)
        assert scheduler.ledger()["slots"] == 0 < most <= demand
        unused.append(demand - most)
    assert min(unused) <= 2, "a demand that no row comes near to refuses requests for nothing"
