"""Scheduler: rows that decode stand back from steps that prompts fill, where nobody awaits their tokens one by one.

Each rule on small numbers: who does, who does not, how often, and that a step is never left empty for it.
"""

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

SAMPLE, LENGTH, PATIENCE = 1, 3, 16


def make(**changes):
    sizes = {"max_slots": 40, "max_rows": 8, "max_tokens": 16, "max_model_len": 256, "num_blocks": 600, "block_size": 4}
    return Scheduler(**{**sizes, **changes})


def plan_for(scheduler):
    return StepPlan(scheduler.max_rows, 16, 256)


def add(scheduler, number, length, *, most=100, whole=True, **more):
    """A prompt unlike others'; its slot."""
    prompt = np.arange(1000 * number, 1000 * number + length, dtype=np.int32)
    slot = scheduler.add(number, prompt, max_tokens=most, arrival=float(number), whole=whole, **more)
    assert slot >= 0
    return slot


def step(scheduler, plan=None):
    """One whole step: tokens by slot."""
    plan = plan or plan_for(scheduler)
    scheduler.schedule(plan)
    given = lens(plan)
    scheduler.commit(plan, np.full(max(1, plan.num_rows), 7, np.int32))
    return given


def lens(plan):
    return dict(zip(list(plan.row_slot)[: plan.num_rows], list(plan.row_len)[: plan.num_rows]))


def decoding(**changes):
    """A scheduler and the slot of its only row, which has its first token."""
    scheduler = make(**{name: value for name, value in changes.items() if name not in ("most", "whole")})
    slot = add(scheduler, 1, 3, **{name: changes[name] for name in ("most", "whole") if name in changes})
    assert step(scheduler) == {slot: 3}
    return scheduler, slot


def test_prompts_have_their_steps_to_themselves_and_all_rows_decode_together_afterwards():
    scheduler, first = decoding()
    second, third = add(scheduler, 2, 16), add(scheduler, 3, 16)
    assert [step(scheduler) for _ in range(3)] == [{second: 16}, {third: 16}, {first: 1, second: 1, third: 1}]
    assert scheduler.shares.times_held == 2 + 1  # the second row in the third's step, too


def test_a_row_whose_answer_is_streamed_has_its_token_in_every_step():
    scheduler, first = decoding(whole=False)
    second = add(scheduler, 2, 16)
    assert step(scheduler) == {first: 1, second: 15}
    third = add(scheduler, 3, 16)
    assert step(scheduler) == {first: 1, second: 1, third: 14}
    assert scheduler.shares.times_held == 0


def test_only_an_answer_that_may_still_be_long_waits():
    for most, held in ((64, False), (65, True)):
        scheduler, first = decoding(most=most)
        add(scheduler, 2, 16)
        assert (first not in step(scheduler)) is held


def test_nobody_waits_where_the_pace_gives_prompts_a_part_of_the_step():
    scheduler, first = decoding()
    second = add(scheduler, 2, 16)
    scheduler.shares.prompt_budget = 15
    assert step(scheduler) == {first: 1, second: 15}


@pytest.mark.parametrize("length", [15, 16])
def test_nobody_waits_for_prompts_that_do_not_fill_the_step(length):
    scheduler, first = decoding()
    second = add(scheduler, 2, length)
    assert step(scheduler) == ({second: 16} if length == 16 else {first: 1, second: 15})


def test_chunks_fill_a_step_only_together():
    scheduler, first = decoding(max_chunk=8)
    second = add(scheduler, 2, 30)
    assert step(scheduler) == {first: 1, second: 8}
    third = add(scheduler, 3, 30)
    assert step(scheduler) == {second: 8, third: 8}


def test_nobody_waits_by_priority():
    scheduler, first = decoding(policy=1)
    second = add(scheduler, 2, 16)
    assert step(scheduler) == {first: 1, second: 15}


def test_nobody_waits_while_all_places_are_taken():
    scheduler, first = decoding(max_rows=1)
    add(scheduler, 2, 16)
    assert [step(scheduler) for _ in range(4)] == [{first: 1}] * 4


def test_nobody_waits_for_media():
    scheduler, first = decoding(encoder_budget=16, encoder_capacity=16)
    entry = scheduler.add_entry(4)
    add(scheduler, 2, 16, media=np.array([[2, 4, entry, 0]], np.int32))
    assert first in step(scheduler)
    assert scheduler.shares.times_held == 0


def test_nobody_waits_where_blocks_may_be_short():
    """A step of 16 tokens in 8 rows takes up to 2 + 8 blocks; the first row has one."""
    for blocks, held in ((1 + 10, False), (1 + 11, True)):
        scheduler, first = decoding(num_blocks=blocks, block_size=8, most=70)
        add(scheduler, 2, 16, most=2)
        assert (first not in step(scheduler)) is held


def test_whoever_stood_back_in_vain_has_a_token_in_the_same_step():
    """The next prompt needs more blocks than are free, which is found when it should start."""
    scheduler, first = decoding(num_blocks=1 + 30)
    add(scheduler, 2, 116, most=2)
    assert step(scheduler) == {first: 1}
    scheduler, first = decoding()
    same = np.arange(100, 116, dtype=np.int32)
    scheduler.add(2, same, max_tokens=1)
    assert first not in step(scheduler)
    third = scheduler.add(3, same, max_tokens=1)  # the cache has three quarters of it
    assert step(scheduler) == {first: 1, third: 4}
    assert scheduler.shares.times_held == 1


def test_a_step_that_stays_empty_is_planned_again_with_every_row():
    """Fewer tokens than rows, after a step that did not fit: one is kept for a row whose picture finds no room."""
    scheduler, first = decoding(max_chunk=3, encoder_budget=32, encoder_capacity=20)
    large, small = scheduler.add_entry(20), scheduler.add_entry(3)
    second = add(scheduler, 2, 24, media=np.array([[0, 20, large, 0]], np.int32))
    third = add(scheduler, 3, 4, media=np.array([[3, 1, small, 0]], np.int32))
    assert step(scheduler) == {first: 1, second: 3, third: 3}
    scheduler.shares.max_tokens = 1
    add(scheduler, 4, 5)
    assert step(scheduler) == {first: 1}
    assert scheduler.shares.times_held == 0


def test_a_stream_of_prompts_without_end_keeps_a_row_waiting_sixteen_times():
    scheduler, first = decoding(most=250)
    left_out = []
    for number in range(2, 60):
        add(scheduler, number, 16, most=1)
        left_out.append(first not in step(scheduler))
    assert left_out == [True] * PATIENCE + [False] * (58 - PATIENCE)
    assert scheduler.abort(1)
    used = add(scheduler, 60, 3)
    assert scheduler.seqs.snapshot(used)["patience"] == PATIENCE, "the next request in that slot has its own"


@pytest.mark.parametrize("whole", [True, False])
def test_a_burst_ends_with_all_rows_decoding_together(whole):
    scheduler = make()
    slots = [add(scheduler, number, 16, most=80, whole=whole) for number in range(1, 9)]
    plans, flying, steps, ends = [plan_for(scheduler) for _ in range(2)], None, [], []
    while scheduler.ledger()["slots"]:
        plan = plans[scheduler.next_step % 2]
        rows = scheduler.schedule(plan)
        if rows:
            steps.append(lens(plan))
        if flying is not None:
            scheduler.commit(flying, np.full(8, 7, np.int32))
            ends += [len(steps)] * sum(why == LENGTH for why in flying.out_finish[: flying.num_rows])
        flying = plan if rows else None
    if whole:
        assert steps == [{slot: 16} for slot in slots] + [dict.fromkeys(slots, 1)] * 79
        assert len(set(ends)) == 1
    else:
        assert len(set(ends)) > 1
    assert scheduler.ledger()["used"] == 0


def test_a_row_that_is_left_out_while_its_token_is_on_its_way_goes_on_with_that_token():
    scheduler = make()
    first, second = add(scheduler, 1, 16), add(scheduler, 2, 16)
    one, two, three = (plan_for(scheduler) for _ in range(3))
    scheduler.schedule(one)
    scheduler.schedule(two)
    assert (lens(one), lens(two)) == ({first: 16}, {second: 16})
    scheduler.commit(one, np.array([33], np.int32))
    scheduler.schedule(three)
    assert lens(three) == {first: 1, second: 1}
    rows = list(three.row_slot[:2])
    assert three.token_ids[rows.index(first)] == 33
    assert three.row_flags[rows.index(first)] == SAMPLE


def test_a_row_may_leave_and_its_step_may_fail_while_it_stands_back():
    scheduler, first = decoding()
    second, third = add(scheduler, 2, 16), add(scheduler, 3, 16)
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.schedule(two)
    assert (lens(one), lens(two)) == ({second: 16}, {third: 16})
    assert scheduler.abort(1)
    assert list(scheduler.freed_slots[: scheduler.num_freed]) == [first]
    again = np.zeros(scheduler.max_slots, np.uint8)
    again[second] = 1
    scheduler.fail(one, again)
    scheduler.commit(two, np.array([7], np.int32))
    assert step(scheduler) == {second: 16}
    assert step(scheduler) == {second: 1, third: 1}
    assert scheduler.abort(2)
    assert scheduler.abort(3)
    assert scheduler.ledger()["used"] == scheduler.ledger()["slots"] == 0


def test_a_row_that_stands_back_may_lose_its_blocks():
    """Blocks get short later on: whoever is preempted has the patience that it had, and ends like the others."""
    scheduler = make(num_blocks=1 + 48, max_model_len=128)
    slots = [add(scheduler, number, 16, most=100) for number in range(1, 9)]
    finished = set()
    for _ in range(2000):
        plan = plan_for(scheduler)
        if scheduler.schedule(plan) == 0:
            break
        scheduler.commit(plan, np.full(8, 7, np.int32))
        rows = range(plan.num_rows)
        finished |= {plan.out_request[row] for row in rows if plan.out_finish[row] == LENGTH}
    assert len(finished) == len(slots)
    assert scheduler.num_preemptions > 0
    assert scheduler.shares.times_held > 0
    assert scheduler.ledger()["used"] == 0
