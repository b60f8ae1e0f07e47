"""States of rows, case by case: which states a request finds again, which are dropped first, which are refused.

A block has 4 tokens. A state belongs to a prefix of a multiple of 4 tokens and takes a run of 3 blocks; a tail takes
2 blocks.
"""

import numpy as np
import pytest

from _fast.layout import CHECKPOINTS, StateColumn
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.states import ALIGN, ALL, NONE

FULL, STATE = (0, 0), (2, 4)
BASE, PURE = [FULL, STATE], [STATE, STATE]
ERROR = 5


def make(**changes):
    values = {"max_slots": 6, "max_rows": 4, "max_tokens": 64, "max_model_len": 1200, "num_blocks": 1200}
    values |= {"block_size": 4, "groups": BASE, "state_blocks": 3, "tail_blocks": 2}
    return Scheduler(**{**values, **changes})


def plan_for(scheduler):
    updates = 2 * scheduler.max_model_len
    return StepPlan(scheduler.max_rows, scheduler.max_tokens, updates, run_width=scheduler.run_width)


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def joined(*parts):
    return np.concatenate(parts).astype(np.int32)


def column(plan, name, row=0):
    return plan.states[name][row]


def serve(scheduler, prompt, answer=1, sampled=7, **options):
    """Runs one request to its end; returns how many of its tokens were in the cache."""
    slot = scheduler.add(1, prompt, max_tokens=answer, **options)
    assert slot >= 0
    plans, found, launched = [plan_for(scheduler) for _ in range(2)], None, []
    while scheduler.ledger()["slots"]:
        plan = plans[scheduler.next_step % 2]
        if scheduler.schedule(plan):
            launched.append(plan)
            found = plan.row_computed[0] if found is None else found
        if len(launched) == 2 or not plan.num_rows:
            scheduler.commit(launched.pop(0), np.full(4, sampled, np.int32))
    assert scheduler.ledger()["runs_used"] == scheduler.ledger()["used"] == 0
    return found


GROUPS = pytest.mark.parametrize("groups", [BASE, PURE], ids=["with attention", "states alone"])


@GROUPS
@pytest.mark.parametrize("length", [30, 32, 33])
def test_a_prompt_is_found_again_up_to_its_last_full_block(groups, length):
    scheduler = make(groups=groups)
    assert [serve(scheduler, text(length)) for _ in range(3)] == [0, (length - 1) // 4 * 4, (length - 1) // 4 * 4]


def test_a_shared_beginning_is_found_by_the_third_request_or_by_the_second_with_a_boundary():
    """A state is made at a prompt's end, and later where attention finds a longer prefix than states do."""
    common, own = text(22), [text(15, 10 + k) for k in range(4)]
    plain, hinted = make(), make()
    assert [serve(plain, joined(common, end)) for end in own] == [0, 0, 20, 20]
    assert [serve(hinted, joined(common, end), boundaries=[22]) for end in own] == [0, 20, 20, 20]
    assert serve(plain, joined(common, own[0])) == 36, "a split leaves the longer prefix where it was"


@pytest.mark.parametrize("max_tokens", [5, 7, 16, 23, 64])
def test_what_is_found_does_not_depend_on_where_the_budget_cuts_chunks(max_tokens):
    scheduler = make(max_tokens=max_tokens)
    prompt, places = text(60), [4, 13, 20, 33, 34, 48]
    assert serve(scheduler, prompt, boundaries=places) == 0
    for place in places:
        assert serve(scheduler, joined(prompt[:place], text(9, place))) == place // 4 * 4, place


@pytest.mark.parametrize("share", [0.0001, 0.01])
def test_where_checkpoints_outnumber_their_room_the_longest_prefix_stays(share):
    scheduler = make(state_share=share, num_blocks=700)
    prompt = text(60)
    for _ in range(2):
        found = serve(scheduler, prompt, boundaries=range(5, 45, 5))
    assert found == 56
    assert scheduler.state_counts["named"] <= max(1, int(share * 699) // 3)


def test_a_state_is_found_only_when_its_step_is_committed():
    scheduler, plans = make(), [plan_for(make()) for _ in range(3)]
    prompt = text(20)
    scheduler.add(1, prompt, max_tokens=2)
    scheduler.schedule(plans[0])
    assert column(plans[0], StateColumn.NEW_BASE) == 16
    scheduler.add(2, prompt, max_tokens=2)
    scheduler.schedule(plans[1])
    assert plans[1].row_computed[1] == 0
    assert scheduler.state_counts["named"] == 0
    scheduler.commit(plans[0], np.full(4, 7, np.int32))
    assert scheduler.state_counts["named"] == 1
    scheduler.add(3, prompt, max_tokens=2)
    scheduler.schedule(plans[2])
    found = dict(zip(plans[2].out_request, plans[2].row_computed))
    assert found[3] == 16


def test_the_columns_say_what_the_step_reads_and_writes():
    scheduler, plan = make(), plan_for(make())
    scheduler.add(1, text(50), max_tokens=9, boundaries=[9, 40])
    scheduler.schedule(plan)
    assert column(plan, StateColumn.BASE_RUN) == column(plan, StateColumn.BASE) == 0
    write, tail = column(plan, StateColumn.WRITE_RUN), column(plan, StateColumn.TAIL_RUN)
    passing = [column(plan, StateColumn.CHECKPOINT_RUN + k) for k in range(CHECKPOINTS)]
    assert column(plan, StateColumn.NEW_BASE) == 48
    assert [column(plan, StateColumn.CHECKPOINT_AT + k) for k in range(CHECKPOINTS)] == [40, 8, 0, 0]
    new = {run: [block for block in blocks if block] for run, blocks in plan.new_runs.items()}
    assert {run: len(blocks) for run, blocks in new.items()} == {tail: 2, write: 3, passing[0]: 3, passing[1]: 3}
    assert all(blocks == scheduler.pool.run(run) for run, blocks in new.items())
    scheduler.commit(plan, np.full(4, 7, np.int32))
    assert scheduler.state_counts["named"] == 3
    for position in range(50, 55):
        scheduler.schedule(plan)
        assert column(plan, StateColumn.BASE) == (52 if position > 52 else 48)
        assert column(plan, StateColumn.NEW_BASE) == (52 if position == 52 else 0), "48 to 51 are settled by then"
        assert column(plan, StateColumn.TAIL_RUN) == tail
        assert (column(plan, StateColumn.BASE_RUN) == write) == (position <= 52)
        scheduler.commit(plan, np.full(4, 7, np.int32))


def test_runs_are_sent_once_and_used_again():
    scheduler, plan, sent = make(), plan_for(make()), 0
    scheduler.add(1, text(10), max_tokens=200)
    while scheduler.schedule(plan):
        sent += len(plan.new_runs)
        scheduler.commit(plan, np.full(4, 7, np.int32))
    assert sent == 4, "a tail, a state, the next one, and one for the state behind the prompt that stays"
    assert scheduler.ledger()["runs_used"] == 0


def test_an_answer_is_found_again_every_256_tokens_and_at_its_end():
    scheduler = make()
    prompt = text(10)
    serve(scheduler, prompt, answer=600)
    known = joined(prompt, np.full(600, 7))
    found = [serve(scheduler, joined(known[:place], text(5, place))) for place in (9, 200, 300, 530, 609)]
    assert found[:4] == [8, 8, 8 + 256, 8 + 512]
    assert 600 < found[4] <= 608


def test_the_modes_name_nothing_or_every_block_of_so_many_tokens():
    prompt = text(60)
    none, every = make(state_mode=NONE), make(state_mode=ALL, state_every=17)
    assert [serve(none, prompt) for _ in range(2)] == [0, 0]
    assert (none.ledger()["cached"], none.state_counts["stored"]) == (0, 0)
    assert [serve(every, prompt) for _ in range(2)] == [0, 40]
    assert [serve(every, joined(prompt[:place], text(9, place))) for place in (19, 39, 41)] == [0, 20, 40]


@GROUPS
def test_another_salt_or_medium_finds_nothing(groups):
    scheduler = make(groups=groups, state_mode=ALIGN)
    prompt = text(30)
    keys = np.stack([prompt.astype(np.int64), np.zeros(30, np.int64)])
    pictured = keys.copy()
    pictured[0, 5:9], pictured[1, 5:9] = -9, 4
    assert serve(scheduler, prompt, keys=keys) == 0
    assert serve(scheduler, prompt, root=bytes([1]) * 16) == 0
    assert serve(scheduler, prompt, keys=pictured) == 0
    assert serve(scheduler, prompt, keys=pictured) == serve(scheduler, prompt, root=bytes([1]) * 16) == 28
    assert serve(scheduler, prompt) == 28


@GROUPS
def test_no_state_of_a_row_with_an_error_is_found(groups):
    scheduler, plan = make(groups=groups), plan_for(make())
    prompt = text(30)
    scheduler.add(1, prompt, max_tokens=30, boundaries=[9])
    for _ in range(12):
        scheduler.schedule(plan)
        scheduler.commit(plan, np.full(4, 7, np.int32))
    assert scheduler.state_counts["named"] == 2
    scheduler.schedule(plan)
    scheduler.commit(plan, np.full(4, -1, np.int32))
    assert plan.out_finish[0] == ERROR
    assert scheduler.state_counts["named"] == scheduler.ledger()["cached"] == 0
    assert serve(scheduler, prompt) == 0


@GROUPS
def test_a_row_that_starts_over_goes_on_from_its_own_state(groups):
    scheduler, plan = make(groups=groups), plan_for(make())
    slot = scheduler.add(1, text(30), max_tokens=300)
    for _ in range(40):
        scheduler.schedule(plan)
        scheduler.commit(plan, np.full(4, 7, np.int32))
    scheduler.schedule(plan)
    scheduler.fail(plan, np.eye(6, dtype=np.uint8)[slot])
    assert scheduler.schedule(plan) == 1
    assert plan.row_computed[0] == column(plan, StateColumn.BASE) == 68
    assert column(plan, StateColumn.BASE_RUN) > 0


def test_states_never_hit_go_first_then_the_longest_unused():
    scheduler = make(state_share=0.0126)  # five states
    prompts = [text(9, k) for k in range(8)]
    for prompt in prompts[:5]:
        serve(scheduler, prompt)
    assert scheduler.state_counts["named"] == 5
    assert [serve(scheduler, prompts[k]) for k in (0, 1)] == [8, 8]
    for prompt in prompts[5:]:
        serve(scheduler, prompt)
    assert (scheduler.state_counts["named"], scheduler.state_counts["dropped"]) == (5, 3)
    blocks = scheduler.ledger()["index_entries"]
    assert [serve(scheduler, prompts[k]) for k in (0, 1, 5, 6, 7)] == [8] * 5
    assert serve(scheduler, prompts[2]) == 0
    assert scheduler.ledger()["index_entries"] == blocks, "its blocks of attention are found all the while"


def test_a_conversation_drops_its_shorter_prefixes_first():
    """A state that only one row has reused has little value once that row has named a longer prefix."""
    scheduler = make(state_share=0.0101)  # four states
    turns = text(9)
    for turn in range(6):
        found = serve(scheduler, turns)
        assert found == (8 * turn if turn else 0)
        turns = joined(turns, text(8, 50 + turn))
    other = text(9, 99)
    serve(scheduler, other)
    assert serve(scheduler, other) == 8
    assert serve(scheduler, joined(turns, text(3))) == 48


def test_a_state_is_dropped_with_its_block():
    scheduler = make(num_blocks=80, max_model_len=128, state_share=1.0)
    for k in range(12):
        assert serve(scheduler, text(60, k)) == 0
    counts, ledger = scheduler.state_counts, scheduler.ledger()
    assert counts["named"] < counts["stored"] == counts["named"] + counts["dropped"]
    assert ledger["cached"] == ledger["index_entries"] + 3 * counts["named"]
    assert serve(scheduler, text(60, 11)) == 56
    scheduler.reset_prefix_cache()
    assert scheduler.ledger()["cached"] == scheduler.state_counts["named"] == 0
    assert serve(scheduler, text(60, 11)) == 0


def test_what_attention_finds_and_states_do_not_is_counted():
    scheduler = make()
    for end in range(2):
        serve(scheduler, joined(text(22), text(15, 10 + end)))
    assert scheduler.prefix_hits == 0
    assert scheduler.state_counts["attention_hit_tokens"] == 20
    serve(scheduler, joined(text(22), text(15, 12)))
    assert (scheduler.prefix_hits, scheduler.state_counts["attention_hit_tokens"]) == (20, 40)
    assert scheduler.state_counts["hit"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": [STATE, FULL]}, "groups of states stand behind all others"),
        ({"groups": [FULL]}, "other groups need none"),
        ({"state_blocks": 0, "tail_blocks": 0}, "need state_blocks and tail_blocks"),
        ({"tail_blocks": 0}, "each is at least 1"),
        ({"groups": [FULL, (2, 0)]}, "folds 0 tokens at once: at least 1"),
        ({"state_mode": 3}, "modes are 0 to 2"),
        ({"state_mode": ALL, "state_every": 0}, "the distance at least 1"),
        ({"state_share": 1.5}, "state_share=1.5: a part of the blocks"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_boundaries_and_plans_that_do_not_fit_are_refused_in_words():
    scheduler = make()
    with pytest.raises(ValueError, match="at most 8, each from 1 to 20, the prompt's length"):
        scheduler.add(1, text(20), max_tokens=1, boundaries=range(1, 10))
    with pytest.raises(ValueError, match="each from 1 to 20"):
        scheduler.add(1, text(20), max_tokens=1, boundaries=[21])
    assert scheduler.ledger()["slots"] == 0
    with pytest.raises(ValueError, match="the plan has runs of 0 blocks: this scheduler has 3"):
        scheduler.schedule(StepPlan(4, 64, 2400))
    assert make(num_blocks=12).add(1, text(20), max_tokens=1) == -2, "two states, a tail and the prompt take 13 blocks"
