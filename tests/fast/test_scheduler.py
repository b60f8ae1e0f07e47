"""Scheduler: single behaviours with small numbers. The random walks are in test_scheduler_walk.py."""

import numpy as np
import pytest

from _fast.layout import TokenCode, record_len
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

SAMPLE, FEED, EXACT = 1, 2, 4
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
    """Plans and commits one whole step."""
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
    with pytest.raises(ValueError, match="prompt of 257 tokens"):
        scheduler.add(1, ids(*range(257)), max_tokens=1)


def test_a_row_that_ends_frees_its_blocks_before_its_slot():
    scheduler = make()
    scheduler.add(1, ids(1, 2, 3, 4, 5), max_tokens=9, eos_ids=[7])
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.schedule(two)
    scheduler.commit(one, ids(7))
    assert scheduler.pool.num_used == 0
    assert scheduler.ledger()["slots"] == 1
    assert scheduler.schedule(one) == 0
    scheduler.commit(two, ids(7))
    assert scheduler.ledger()["slots"] == 0


def test_stop_ids_count_only_from_min_tokens_on():
    scheduler = make()
    scheduler.add(1, ids(1), max_tokens=9, min_tokens=3, eos_ids=[7], stop_ids=[9, 8])
    assert [int(step(scheduler, 7).out_finish[0]) for _ in range(2)] == [0, 0]
    assert step(scheduler, 8).out_finish[0] == STOP_TOKEN
    scheduler.add(2, ids(1), max_tokens=2, min_tokens=5, eos_ids=[7])
    assert [int(step(scheduler, 7).out_finish[0]) for _ in range(2)] == [0, LENGTH]
    scheduler.add(3, ids(1), max_tokens=2, ignore_eos=True, eos_ids=[7])
    assert [int(step(scheduler, 7).out_finish[0]) for _ in range(2)] == [0, LENGTH]


@pytest.mark.parametrize("length", [254, 255])
def test_a_context_is_used_to_its_last_token(length):
    scheduler = make(max_tokens=64, num_blocks=65)
    assert scheduler.add(1, ids(*range(length)), max_tokens=1000) == 0
    made = []
    while not made or not made[-1]:
        plan = step(scheduler)
        made += [int(plan.out_finish[0])] if plan.out_token[0] >= 0 else []
    assert made == [0] * (255 - length) + [LENGTH]
    assert scheduler.ledger()["used"] == 0


def test_decoding_rows_go_first_and_prompts_share_what_is_left():
    scheduler = make(max_tokens=10)
    first = scheduler.add(1, ids(1, 2), max_tokens=9)
    step(scheduler)
    second = scheduler.add(2, ids(*range(12)), max_tokens=9)
    third = scheduler.add(3, ids(*range(50, 60)), max_tokens=9)
    plan = step(scheduler)
    assert rows(plan) == {first: (2, 1, SAMPLE), second: (0, 9, 0)}
    assert plan.num_decode_rows == 1
    plan = step(scheduler)
    assert rows(plan) == {first: (3, 1, SAMPLE), second: (9, 3, SAMPLE), third: (0, 6, 0)}


def test_a_chunk_is_never_longer_than_the_limit():
    scheduler = make(max_chunk=5)
    slot = scheduler.add(1, ids(*range(12)), max_tokens=9)
    assert [rows(step(scheduler))[slot][1] for _ in range(4)] == [5, 5, 2, 1]


def test_a_preempted_request_keeps_its_prefix_and_its_tokens():
    scheduler = make(num_blocks=9, max_rows=2)
    one = scheduler.add(1, ids(*range(10, 22)), max_tokens=20, arrival=1.0)
    two = scheduler.add(2, ids(*range(30, 42)), max_tokens=20, arrival=2.0)
    plans = [step(scheduler, 7)]
    while scheduler.num_preemptions == 0:
        plans.append(step(scheduler, 7))
    assert list(rows(plans[-1])) == [one]
    assert scheduler.num_waiting == 1
    made = scheduler.seqs.snapshot(two)["num_tokens"] - 12
    assert scheduler.abort(1)
    again = step(scheduler, 8)
    # The other row has taken the last of this row's four full blocks: the tokens of that block are computed again.
    start, count, flags = rows(again)[two]
    assert (start + count, flags) == (12 + made, SAMPLE)
    assert (start, made) == (12, 5)
    assert list(again.token_ids[:count]) == [*range(30, 42), *[7] * made][start:]
    assert scheduler.cached_tokens(two) == 0, "the client hears of the first start only"


def test_the_last_arrival_is_preempted_and_returns_to_the_front():
    scheduler = make(num_blocks=9, max_rows=2, max_slots=4)
    scheduler.add(1, ids(*range(10, 22)), max_tokens=20, arrival=1.0)
    two = scheduler.add(2, ids(*range(30, 42)), max_tokens=12, arrival=2.0)
    step(scheduler)
    three = scheduler.add(3, ids(*range(50, 54)), max_tokens=12, arrival=0.5)
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.queue.peek() == two
    assert scheduler.abort(1)
    assert set(rows(step(scheduler))) == {two, three}


def test_priority_decides_who_runs_and_who_is_preempted():
    scheduler = make(num_blocks=9, max_rows=2, policy=1)
    low = scheduler.add(1, ids(*range(10, 22)), max_tokens=20, priority=5, arrival=1.0)
    high = scheduler.add(2, ids(*range(30, 42)), max_tokens=20, priority=-5, arrival=3.0)
    mid = scheduler.add(3, ids(*range(50, 62)), max_tokens=20, priority=0, arrival=2.0)
    assert list(rows(step(scheduler))) == [high, mid]
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert scheduler.queue.peek() == mid
    assert scheduler.abort(2)
    assert set(rows(step(scheduler))) == {mid, low}


def test_an_equal_prompt_takes_over_the_blocks_of_the_first():
    scheduler = make()
    scheduler.add(1, ids(*range(12)), max_tokens=1)
    step(scheduler)
    slot = scheduler.add(2, ids(*range(12)), max_tokens=1)
    other = scheduler.add(3, ids(*range(12)), max_tokens=1, root=b"another scope...")
    plan = step(scheduler)
    assert rows(plan) == {slot: (8, 4, SAMPLE), other: (0, 12, SAMPLE)}
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (36, 8)


def test_equal_prompts_that_started_together_end_up_sharing_blocks():
    scheduler = make()
    one = scheduler.add(1, ids(*range(12)), max_tokens=4)
    two = scheduler.add(2, ids(*range(12)), max_tokens=4)
    step(scheduler)
    assert scheduler.tables.row(one) == scheduler.tables.row(two)
    plan = step(scheduler)
    emitted = {(plan.updates[u, 0], plan.updates[u, 1]) for u in range(plan.num_updates)}
    assert {(two, 0), (two, 1), (two, 2)} <= emitted, "the device gets the exchange with the row's next step"


def test_a_sliding_group_gives_back_what_its_window_has_left():
    scheduler = make(groups=[(1, 6)], num_blocks=10, max_tokens=8)
    slot = scheduler.add(1, ids(*range(40)), max_tokens=100)
    for _ in range(60):
        step(scheduler)
        row = scheduler.tables.row(slot)
        assert sum(block > 0 for block in row) <= 5
    assert len(row) > 20


def test_blocks_of_a_row_that_ended_with_an_error_are_not_offered_to_others():
    scheduler = make()
    scheduler.add(1, ids(*range(12)), max_tokens=4)
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    scheduler.commit(plan, ids(-1), ids(ERROR))
    assert (plan.out_token[0], plan.out_finish[0]) == (-1, ERROR)
    ledger = scheduler.ledger()
    assert ledger["index_entries"] == ledger["used"] == ledger["slots"] == 0


def test_an_error_takes_back_what_earlier_chunks_had_offered():
    scheduler = make(max_tokens=8)
    scheduler.add(1, ids(*range(20)), max_tokens=4)
    step(scheduler)
    assert scheduler.ledger()["index_entries"] == 2
    scheduler.add(2, ids(*range(8), *range(90, 102)), max_tokens=4)  # shares them
    while True:
        plan = plan_for(scheduler)
        scheduler.schedule(plan)
        tokens, ends = ids(*[7] * plan.num_rows), ids(*[0] * plan.num_rows)
        for row in range(plan.num_rows):
            if plan.out_request[row] == 1 and plan.row_flags[row] & 1:
                tokens[row], ends[row] = -1, ERROR
        scheduler.commit(plan, tokens, ends)
        if ERROR in ends:
            break
    assert scheduler.ledger()["slots"] == 1
    assert scheduler.ledger()["index_entries"] == 0
    while scheduler.ledger()["slots"]:
        step(scheduler)
    # The other row ends without an error. It has named no block whose parent block was removed from the index.
    ledger = scheduler.ledger()
    assert ledger["index_entries"] == ledger["cached"] == 0
    assert ledger["free"] == ledger["total"]
    slot = scheduler.add(3, ids(*range(20)), max_tokens=1)
    step(scheduler)
    assert scheduler.cached_tokens(slot) == 0


def test_a_reset_of_the_prefix_cache_leaves_live_rows_alone():
    scheduler = make()
    slot = scheduler.add(1, ids(*range(12)), max_tokens=20)
    step(scheduler)
    assert scheduler.ledger()["index_entries"] == 3
    scheduler.reset_prefix_cache()
    for _ in range(8):
        assert list(rows(step(scheduler))) == [slot]
    # New blocks of this row would have parents that are no longer in the index, so the row names no more blocks.
    assert scheduler.ledger()["index_entries"] == 0
    assert scheduler.abort(1)
    assert scheduler.ledger()["free"] == scheduler.ledger()["total"]


def test_a_failed_step_ends_its_rows_and_no_others():
    scheduler = make(max_rows=2)
    scheduler.add(1, ids(1, 2, 3), max_tokens=8)
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    other = scheduler.add(2, ids(4, 5, 6), max_tokens=8)
    scheduler.schedule(two)
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.fail(two)
    scheduler.fail(one)
    assert (one.out_token[0], one.out_finish[0], one.out_request[0]) == (-1, ERROR, 1)
    scheduler.commit(two, ids(7, 7))
    assert sorted(zip(two.out_request[:2], two.out_token[:2], two.out_finish[:2])) == [(1, -1, 0), (2, 7, 0)]
    assert list(rows(step(scheduler))) == [other]


def test_a_row_that_starts_over_forgets_what_it_has_in_flight():
    scheduler = make(max_rows=2)
    slot = scheduler.add(1, ids(1, 2, 3), max_tokens=8)
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.schedule(two)
    again = np.zeros(scheduler.max_slots, np.uint8)
    with pytest.raises(ValueError, match="again has 0 bytes"):
        scheduler.fail(one, again[:0])
    again[slot] = 1
    scheduler.fail(one, again)
    assert (one.out_token[0], one.out_finish[0]) == (-1, 0)
    assert scheduler.schedule(plan_for(scheduler)) == 0, "it waits for what is in flight"
    scheduler.commit(two, ids(7))
    assert (two.out_token[0], two.out_finish[0]) == (-1, 0)
    assert scheduler.num_preemptions == 1
    plan = step(scheduler)
    assert list(plan.token_ids[:3]) == [1, 2, 3]
    assert (plan.out_token[0], plan.out_finish[0]) == (7, 0)


def test_a_smaller_budget_still_gives_each_row_its_token():
    scheduler = make(max_rows=4, max_tokens=16)
    for number in range(3):
        scheduler.add(number, ids(1, 2), max_tokens=8)
    step(scheduler)
    scheduler.add(3, ids(*range(12)), max_tokens=8)
    scheduler.shares.max_tokens = 8
    assert step(scheduler).num_tokens == 8
    scheduler.shares.max_tokens = 1
    assert step(scheduler).num_tokens == 3
    scheduler.shares.max_tokens = 16
    assert step(scheduler).num_tokens == 10


def test_an_abort_says_at_once_whether_the_slot_is_free():
    scheduler = make()
    waiting = scheduler.add(1, ids(1, 2), max_tokens=5)
    assert scheduler.abort(1)
    assert list(scheduler.freed_slots[: scheduler.num_freed]) == [waiting]
    assert not scheduler.abort(1)
    running = scheduler.add(2, ids(1, 2), max_tokens=5)
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    assert scheduler.abort(2)
    assert scheduler.num_freed == 0
    scheduler.commit(plan, ids(7))
    assert (plan.out_token[0], plan.out_finish[0]) == (-1, 0)
    assert list(scheduler.freed_slots[: scheduler.num_freed]) == [running]


def runs(*rows, found=0, width=4):
    """The runs of tokens of a step's rows, as the device copies them to the host; `found`: drafts that follow."""
    return np.array([[*row, *[TokenCode.END - found] * (width - len(row))] for row in rows], np.int32).ravel()


def test_a_row_takes_its_run_up_to_the_first_token_that_ends_it():
    scheduler, plan, behind = make(), StepPlan(4, 32, 100, width=4), StepPlan(4, 32, 100, width=4)
    rules = {"stop_ids": [9], "drafts": 2}
    slots = [scheduler.add(k, ids(1, 2), max_tokens=most, **rules) for k, most in ((1, 9), (2, 9), (3, 3), (4, 9))]
    scheduler.schedule(plan)
    scheduler.commit(plan, runs((5,), (5,), (5,), (5,), found=2))
    scheduler.schedule(plan)
    assert rows(plan) == {slot: (2, 2 if slot == slots[2] else 3, FEED | SAMPLE | EXACT) for slot in slots}
    assert (list(plan.token_ids[:4]), plan.num_tokens) == ([-1] * 4, 11), "the device deals the places of drafts out"
    assert scheduler.schedule(behind) == 4, "each run has a token at least"
    assert rows(behind)[slots[0]] == (3, 3, FEED | SAMPLE), "the newest one, wherever it is"
    assert rows(behind)[slots[2]] == (3, 1, FEED | SAMPLE), "no draft follows the last token that is computed"
    scheduler.commit(plan, runs((5, 6), (5, 9, 6), (5, 6), ()))
    order = list(plan.row_slot[:4])
    assert {slot: plan.out_count[row] for row, slot in enumerate(order)} == dict(zip(slots, (2, 2, 2, 0)))
    assert [list(plan.out_token[4 * row :])[:2] for row in range(3)] == [[5, 6], [5, 9], [5, 6]]
    assert list(plan.out_finish)[:4] == [0, STOP_TOKEN, LENGTH, STOP]
    assert plan.out_token[12] == -1
    scheduler.schedule(plan)
    assert rows(plan) == {slots[0]: (5, 1, FEED | SAMPLE)}, "the run but its newest token is computed"
    order = list(behind.row_slot[:4])
    scheduler.commit(behind, runs(*[(7, 8) if slot == slots[0] else (1,) for slot in order]))
    assert {slot: behind.out_count[row] for row, slot in enumerate(order)} == dict(zip(slots, (2, 0, 0, 0)))
    scheduler.commit(plan, runs((4,)))
    scheduler.schedule(plan)
    assert rows(plan) == {slots[0]: (7, 1, SAMPLE)}
    assert plan.token_ids[0] == 4
    scheduler.commit(plan, runs((3,), found=3))
    assert (plan.out_finish[0], scheduler.ledger()["in_flight"], scheduler.ledger()["slots"]) == (0, 0, 1)
    scheduler.schedule(plan)
    assert rows(plan) == {slots[0]: (8, 2, FEED | SAMPLE | EXACT)}
    scheduler.schedule(behind)
    scheduler.commit(plan, runs((2,)))
    assert scheduler.schedule(plan) == 0, "its last token is certainly on its way"


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_traced_row_computes_all_of_a_run_that_its_end_cuts(in_flight):
    scheduler, plans = make(), [StepPlan(4, 32, 100, width=4) for _ in range(2)]
    scheduler.add(1, ids(1, 2), max_tokens=9, stop_ids=[9], traced=True, drafts=2)
    scheduler.schedule(plans[0])
    scheduler.commit(plans[0], runs((5,), found=2))
    scheduler.schedule(plans[0])
    if in_flight:
        scheduler.schedule(plans[1])
    scheduler.commit(plans[0], runs((5, 9, 6)))
    assert (list(plans[0].out_token[:2]), plans[0].out_finish[0]) == ([5, 9], STOP_TOKEN)
    scheduler.schedule(plans[0])
    assert list(rows(plans[0]).values()) == [(4, 1, 0)], "the device went on behind a token that the answer has not"
    assert plans[0].token_ids[0] == 9
    if in_flight:
        scheduler.commit(plans[1], runs((7,)))
        assert scheduler.num_freed == 0
    scheduler.commit(plans[0], runs(()))
    assert list(scheduler.freed_lens[: scheduler.num_freed]) == [5]


def test_slots_run_out_before_anything_breaks():
    scheduler = make(max_slots=2, max_rows=2)
    assert [scheduler.add(k, ids(1), max_tokens=1) for k in range(3)] == [0, 1, -1]


def test_a_plan_lies_in_the_memory_it_is_given():
    size = record_len(4, 32, 100)
    memory = np.full(size + 3, 5, np.int32)
    plan = StepPlan(4, 32, 100, memory)
    scheduler = make(max_model_len=100)
    scheduler.add(1, ids(11, 12, 13), max_tokens=5)
    scheduler.schedule(plan)
    assert list(memory[:10]) == [1, 3, 0, 1, 0, 0, 1, 0, 0, plan.used_len]
    assert np.shares_memory(np.asarray(plan.token_ids), memory)
    assert {11, 12, 13} <= set(memory.tolist())
    assert list(memory[size:]) == [5, 5, 5]
    with pytest.raises(ValueError, match="buffer holds 10"):
        StepPlan(4, 32, 100, np.zeros(10, np.int32))


def test_one_token_follows_a_prompt_that_fills_the_context():
    scheduler = make(max_model_len=12, num_blocks=4, block_size=4)  # three blocks and the dummy block
    with pytest.raises(ValueError, match="leaves room for one"):
        scheduler.add(1, ids(*range(12)), max_tokens=2)
    with pytest.raises(ValueError, match="prompt of 13 tokens"):
        scheduler.add(1, ids(*range(13)), max_tokens=1)
    scheduler.add(1, ids(*range(12)), max_tokens=1)
    plan = plan_for(scheduler)
    assert scheduler.schedule(plan) == 1
    assert scheduler.schedule(plan_for(scheduler)) == 0, "its last sample is on its way"
    scheduler.commit(plan, np.array([7], np.int32))
    assert (plan.out_token[0], plan.out_finish[0]) == (7, LENGTH)
    assert scheduler.ledger()["slots"] == scheduler.ledger()["used"] == 0


def test_a_plan_in_flight_is_not_overwritten():
    scheduler = make()
    scheduler.add(1, ids(1), max_tokens=5)
    plan = plan_for(scheduler)
    scheduler.schedule(plan)
    with pytest.raises(ValueError, match="in flight"):
        scheduler.schedule(plan)
    with pytest.raises(ValueError, match="needs 4, 32, 64"):
        scheduler.schedule(StepPlan(4, 32, 5))


def test_an_empty_step_needs_no_commit():
    scheduler = make()
    plan = plan_for(scheduler)
    assert scheduler.schedule(plan) == 0
    assert plan.step_id == -1
    scheduler.commit(plan, ids())
    assert scheduler.num_in_flight == 0


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3, 2**62 - 9])
def test_counters_pass_the_edges_of_32_bits(start):
    scheduler = make(first_step=start)
    scheduler.add(2**63 - 1, ids(1, 2), max_tokens=8)
    for k in range(8):
        plan = step(scheduler)
        assert plan.step_id == start + k
        assert plan.record[4] + (int(plan.record[5]) << 31) == start + k
        assert plan.out_request[0] == 2**63 - 1
    assert plan.out_finish[0] == LENGTH


def test_a_long_context_costs_memory_only_where_it_is_used():
    scheduler = make(max_slots=512, max_model_len=1 << 20, num_blocks=1 << 16, block_size=16, max_tokens=64)
    assert scheduler.add(1, ids(*range(100)), max_tokens=1 << 20) == -2
    assert scheduler.add(1, ids(*range(100)), max_tokens=1 << 19) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_rows": 9}, "as rows"),
        ({"num_blocks": 1}, "block 0 is the dummy"),
        ({"groups": []}, "groups is empty"),
        ({"groups": [(1, 0)]}, "window 0"),
        ({"groups": [(7, 0)]}, "kind 7"),
        ({"hash_key": b"short"}, "exactly 16"),
        ({"policy": 2}, "by priority"),
        ({"encoder_budget": -1}, "no limit"),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": ids()}, "prompt of 0 tokens"),
        ({"max_tokens": 0}, "at least one is generated"),
        ({"request_id": -1}, "ids are >= 0"),
        ({"root": b"x"}, "root has 16 bytes"),
        ({"keys": np.zeros((2, 2), np.int64)}, r"the shape \[2, 3\]"),
        ({"media": ids(3, 4, 1, 0).reshape(1, 4)}, "begin in the prompt"),
        ({"media": ids(0, 2, 1, 0).reshape(1, 4)}, "does not exist"),
    ],
)
def test_a_wrong_request_is_refused_in_words(arguments, words):
    scheduler = make()
    values = {"request_id": 1, "tokens": ids(1, 2, 3), "max_tokens": 4, **arguments}
    with pytest.raises(ValueError, match=words):
        scheduler.add(values.pop("request_id"), values.pop("tokens"), **values)
    assert scheduler.ledger()["slots"] == 0


def test_an_add_that_fails_half_way_gives_its_slot_back():
    scheduler = make()
    with pytest.raises(TypeError):
        scheduler.add(1, ids(1, 2), max_tokens=4, stop_ids=["x"])
    assert scheduler.ledger()["slots"] == 0


def test_prompts_keep_to_their_budget():
    scheduler = make(max_tokens=64)
    scheduler.shares.prompt_budget = 5
    first = scheduler.add(1, ids(*range(20)), max_tokens=8)
    assert [rows(step(scheduler))[first][1] for _ in range(4)] == [5, 5, 5, 5]
    scheduler.shares.prompt_budget = 0
    second = scheduler.add(2, ids(1, 2, 3), max_tokens=8)
    assert rows(step(scheduler))[second][1] == 1  # the prompt goes on, however slowly


def test_a_small_rest_of_a_prompt_is_taken_along():
    scheduler = make(max_tokens=64)
    scheduler.shares.prompt_budget = 16
    first = scheduler.add(1, ids(*range(18)), max_tokens=8)
    second = scheduler.add(2, ids(*range(30, 49)), max_tokens=8)
    assert rows(step(scheduler)) == {first: (0, 18, SAMPLE)}
    assert [rows(step(scheduler))[second][1] for _ in range(2)] == [16, 3]


def test_a_short_prompt_overtakes_the_chunks_of_a_long_one_which_still_gets_its_part():
    scheduler = make(max_tokens=16, max_slots=8, max_rows=4)
    long = scheduler.add(1, ids(*range(56)), max_tokens=8)
    assert rows(step(scheduler))[long][1] == 16
    short = [scheduler.add(n, ids(*range(n, n + 6)), max_tokens=8, arrival=1.0) for n in (2, 3)]
    given = {slot: length for slot, (_, length, _) in rows(step(scheduler)).items()}
    assert given == {long: 4, short[0]: 6, short[1]: 6}
    given = {slot: length for slot, (_, length, _) in rows(step(scheduler)).items()}
    assert given == {short[0]: 1, short[1]: 1, long: 14}


def test_what_an_overtaking_prompt_leaves_over_goes_to_the_long_one():
    scheduler = make(max_tokens=16, max_slots=8, max_rows=4, num_blocks=23)
    other = scheduler.add(1, ids(*range(30)), max_tokens=8)
    step(scheduler)
    step(scheduler)
    long = scheduler.add(2, ids(*range(60)), max_tokens=4, arrival=1.0)
    assert rows(step(scheduler))[long][1] == 15
    scheduler.add(3, ids(*range(40)), max_tokens=8, arrival=2.0)  # shorter, but too few blocks are free for it
    given = {slot: length for slot, (_, length, _) in rows(step(scheduler)).items()}
    assert given == {other: 1, long: 15}


def test_a_worse_priority_does_not_overtake():
    scheduler = make(max_tokens=16, max_slots=8, max_rows=4, policy=1)
    long = scheduler.add(1, ids(*range(56)), max_tokens=8)
    step(scheduler)
    scheduler.add(2, ids(1, 2, 3), max_tokens=8, priority=1)
    assert rows(step(scheduler)) == {long: (16, 16, 0)}
    better = scheduler.add(3, ids(1, 2, 3), max_tokens=8, priority=-1)
    assert rows(step(scheduler))[better][1] == 3


def test_the_load_counts_rows_and_what_prompts_lack():
    scheduler = make(max_tokens=16, max_slots=8, max_rows=4)
    assert scheduler.shares.load() == (0, 0, 0, 0)
    scheduler.add(1, ids(*range(4)), max_tokens=8)
    step(scheduler)
    scheduler.add(2, ids(*range(50, 90)), max_tokens=8, arrival=1.0)
    scheduler.add(3, ids(*range(100, 109)), max_tokens=8, arrival=2.0)
    assert scheduler.shares.load() == (1, 2, 49, 40)
    step(scheduler)
    assert scheduler.shares.load() == (1, 1, 49 - 15, 25)


def whole(**changes):
    """A scheduler with whole prompts: each is computed in one step of 32 tokens; every row ends with its step."""
    return make(max_chunk=32, max_model_len=32, whole_prompts=True, max_slots=100, max_rows=16, **changes)


def lengths(scheduler, count=1):
    """Prompt lengths in each of the next steps; the steps are committed."""
    steps = []
    for _ in range(count):
        plan = plan_for(scheduler)
        scheduler.schedule(plan)
        steps.append([int(plan.row_len[r]) for r in range(plan.num_rows)])
        scheduler.commit(plan, np.full(max(1, plan.num_rows), int(TokenCode.END), np.int32))
    return steps


def wait(scheduler, *sizes):
    for request, size in enumerate(sizes):
        scheduler.add(request, np.full(size, request + 1, np.int32), max_tokens=1, arrival=float(request))


def test_shorter_whole_prompts_fill_the_step_before_a_long_one_but_overtake_it_once():
    scheduler = whole()
    wait(scheduler, 20, 30, 5, 28, 6, 7, 8)
    assert lengths(scheduler, 4) == [[20, 5, 6], [30], [28], [7, 8]]  # 6 has overtaken 28 too, so 7 waits for 28


def test_whole_prompts_that_fit_come_in_their_order():
    scheduler = whole()
    wait(scheduler, 10, 10, 10, 10, 2, 2)
    assert lengths(scheduler, 2) == [[10, 10, 10, 2], [10, 2]]
    assert scheduler.ledger()["waiting"] == 0


def test_no_more_than_64_whole_prompts_are_looked_past():
    scheduler = whole()
    wait(scheduler, 20, *[13] * 64, 12)
    assert lengths(scheduler) == [[20, 12]]
    scheduler = whole()
    wait(scheduler, 20, *[13] * 65, 12)
    assert lengths(scheduler, 2) == [[20], [13, 13]]


def test_prompts_in_chunks_are_not_overtaken():
    scheduler = make(num_blocks=10)
    wait(scheduler, 30, 20, 2)
    assert [list(rows(step(scheduler)).values()) for _ in range(1)] == [[(0, 30, SAMPLE)]]
