"""PlainRows: rows that go on one token at a time are settled as the general way settles them, names and blocks too."""

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

ROWS = 12


def make():
    scheduler = Scheduler(max_slots=ROWS, max_rows=ROWS, max_tokens=64, max_model_len=200, num_blocks=300, block_size=4)
    return scheduler, [StepPlan(ROWS, 64, 512) for _ in range(2)]


def lines(plan):
    """What a schedule leaves behind for the device, but for params and what is beyond the rows."""
    rows = plan.num_rows
    columns = (plan.row_slot, plan.row_len, plan.row_computed, plan.row_flags, plan.token_ids, plan.out_request)
    counts = [plan.num_rows, plan.num_tokens, plan.num_decode_rows, plan.num_sampled, plan.num_updates]
    found = [np.asarray(column)[: plan.num_tokens if column is plan.token_ids else rows].tolist() for column in columns]
    starts = np.asarray(plan.row_start)[: rows + 1].tolist()
    return counts, found, starts, np.asarray(plan.updates)[: plan.num_updates].tolist()


def facts(scheduler, plan):
    """What a commit leaves behind."""
    rows = plan.num_rows
    columns = (plan.out_request, plan.out_token, plan.out_finish, plan.row_slot, plan.row_computed, plan.row_flags)
    slots = [scheduler.seqs.snapshot(slot) for slot in range(ROWS)]
    return [np.asarray(column)[:rows].tolist() for column in columns], slots, scheduler.ledger()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_settled_alike_with_and_without_overrides(seed, shared):
    """Overrides, even if they say nothing, are the general way's. Of equal blocks either may keep another one."""
    rng = np.random.default_rng(seed)
    (one, plans), (other, others) = make(), make()
    in_flight, number, ended = [], 0, set()
    for step in range(250):
        if rng.random() < 0.5:
            prompt = rng.integers(10, 12 if shared else 1 << 20, rng.integers(1, 30)).astype(np.int32)
            rules = {
                "max_tokens": int(rng.integers(1, 60)), "min_tokens": int(rng.integers(0, 9)), "arrival": float(number),
                "eos_ids": list(range(3, 3 + rng.integers(0, 7))), "stop_ids": [9][: rng.integers(2)],
            }  # fmt: skip
            assert one.add(number, prompt, **rules) == other.add(number, prompt, **rules)
            number += 1
        if number and rng.random() < 0.05:
            gone = int(rng.integers(number))
            assert one.abort(gone) == other.abort(gone)
        mine, theirs = plans[step % 2], others[step % 2]
        assert one.schedule(mine) == other.schedule(theirs)
        planned = [np.asarray(plan.record)[: plan.tail_at + 4 * plan.num_updates] for plan in (mine, theirs)]
        if shared:
            planned = [record[: mine.tail_at] for record in planned]
        assert np.array_equal(*planned)
        if mine.num_rows:
            in_flight.append((mine, theirs))
        if len(in_flight) == 2 or (in_flight and not mine.num_rows):
            mine, theirs = in_flight.pop(0)
            # Where blocks are shared it depends on the order what a row's error takes from others.
            tokens = rng.choice([10, 11, 3, 9, 11 if shared else -1], mine.num_rows, p=[0.5, 0.45, 0.02, 0.02, 0.01])
            tokens = tokens.astype(np.int32)
            one.commit(mine, tokens)
            other.commit(theirs, tokens, np.zeros(mine.num_rows, np.int32))
            assert facts(one, mine) == facts(other, theirs)
            if not shared:
                assert [one.tables.row(k) for k in range(ROWS)] == [other.tables.row(k) for k in range(ROWS)]
            ended |= set(np.asarray(mine.out_finish)[: mine.num_rows].tolist())
    assert ended == {0, 1, 2, 3} | ({5} - {5 * shared})


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_used_again_says_what_a_new_one_says(seed):
    """Rows come, stop, are aborted, run out of blocks and start over; two schedulers take the same plans by turns."""
    rng = np.random.default_rng(seed)

    def build():
        return Scheduler(
            max_slots=ROWS, max_rows=ROWS, max_tokens=64, max_model_len=200, num_blocks=120, block_size=4,
            prefix_caching=bool(seed % 2),
        )  # fmt: skip

    pairs, plans = [(build(), build()) for _ in range(2)], [StepPlan(ROWS, 64, 512) for _ in range(2)]
    number = again = 0
    for _ in range(400):
        one, other = pairs[int(rng.random() < 0.1)]
        for _ in range(rng.integers(0, 3)):
            prompt = rng.integers(10, 1 << 20, rng.integers(1, 30)).astype(np.int32)
            rules = {"max_tokens": int(rng.integers(20, 160)), "eos_ids": [3], "arrival": float(number)}
            assert one.add(number, prompt, **rules) == other.add(number, prompt, **rules)
            number += 1
        if number and rng.random() < 0.1:
            gone = int(rng.integers(number))
            assert one.abort(gone) == other.abort(gone)
        in_flight = []
        for _ in range(rng.integers(1, 12)):
            mine, new = plans[one.next_step % 2], StepPlan(ROWS, 64, 512)
            assert one.schedule(mine) == other.schedule(new)
            assert lines(mine) == lines(new)
            if mine.num_rows:
                in_flight.append((mine, new))
            while in_flight and (len(in_flight) == 2 or not mine.num_rows):
                settle(rng, one, other, *in_flight.pop(0))
        while in_flight:
            settle(rng, one, other, *in_flight.pop(0))
        again += one.num_preemptions
    assert again


def settle(rng, one, other, mine, new):
    """Commits a step, or lets it fail, and what failed starts over."""
    if rng.random() < 0.03:
        rows = rng.integers(0, 2, ROWS).astype(np.uint8)
        one.fail(mine, rows)
        other.fail(new, rows)
    else:
        tokens = rng.choice([10, 3, -1], mine.num_rows, p=[0.97, 0.02, 0.01]).astype(np.int32)
        one.commit(mine, tokens)
        other.commit(new, tokens)
    assert facts(one, mine) == facts(other, new)
