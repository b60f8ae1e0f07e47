"""SeqTable: one reset covers all data of a slot, so a slot's next request finds nothing of the last one (S37)."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from _fast.layout import TokenCode
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.seqs import SeqTable

DECLARED = (Path(__file__).resolve().parents[2] / "_fast" / "seqs.pxd").read_text()
STRUCT = DECLARED.split("cdef struct Seq:")[1].split("\n\n")[0]
FIELDS = re.findall(r"^    \w+\*? (\w+)(?:  # .*)?$", STRUCT, re.MULTILINE)
BUFFERS = re.findall(r"^    \w+\* (\w+)(?:  # .*)?$", STRUCT, re.MULTILINE)


def test_the_snapshot_names_every_declared_field_and_the_reset_frees_every_buffer():
    assert len(FIELDS) > 30
    assert list(SeqTable(1).snapshot(0)) == FIELDS
    reset = (Path(__file__).resolve().parents[2] / "_fast" / "seqs.pyx").read_text()
    reset = reset.split("cdef void reset(")[1].split("cdef void promise(")[0]
    assert "memset(own, 0, sizeof(Seq))" in reset
    assert len(BUFFERS) == 6
    for buffer in BUFFERS:
        assert f"free(own.{buffer})" in reset, buffer


def test_a_slot_that_was_used_in_every_way_looks_new_afterwards():
    scheduler = Scheduler(
        max_slots=1, max_rows=1, max_tokens=8, max_model_len=64, num_blocks=20, block_size=4, policy=1
    )  # fmt: skip
    new = scheduler.seqs.snapshot(0)
    plan, end = StepPlan(1, 8, 64, width=3), int(TokenCode.END)
    entry = scheduler.add_entry(4)
    scheduler.add(
        9,
        np.arange(12, dtype=np.int32),
        max_tokens=30,
        min_tokens=2,
        eos_ids=[5],
        stop_ids=[6],
        priority=3,
        arrival=2.5,
        root=bytes(range(16)),
        keys=np.arange(24, dtype=np.int64).reshape(2, 12),
        media=np.array([[0, 4, entry, 0], [5, 4, entry, 0]], np.int32),
        bi_spans=np.array([[0, 4]], np.int32),
        traced=True,
        drafts=1,
    )
    for _ in range(6):
        scheduler.schedule(plan)
        scheduler.commit(plan, np.array([7, end - 1, end], np.int32))
    scheduler.reset_prefix_cache()
    used = scheduler.seqs.snapshot(0)
    passing = {"choosing", "pending", "in_flight", "fails_at_settle", "restarting", "redoing", "closing", "state"}
    same = {name for name in FIELDS if used[name] == new[name]} - passing
    assert same == {"order", "epoch"}, "this request should have changed every field"
    scheduler.abort(9)
    after = scheduler.seqs.snapshot(0)
    assert after.pop("epoch") > new.pop("epoch"), "plans of the former owner must not match the next one"
    assert after == new


@pytest.mark.parametrize("prompt", [1, 200, 236, 250, 1000, 16300, 16380, 30000])
def test_tokens_stay_what_they_were_while_their_buffers_grow(prompt):
    """Three interleaved rows grow, and are then read again from the start."""
    length, steps = 40000, 600 if prompt < 300 else 120
    scheduler = Scheduler(
        max_slots=3, max_rows=3, max_tokens=length, max_model_len=length, num_blocks=8000, block_size=16,
        prefix_caching=False,
    )  # fmt: skip
    plan, rng = StepPlan(3, length, 8000), np.random.default_rng(prompt)
    for round in range(2):
        rows = {}
        for k in range(3):
            tokens = rng.integers(0, 1 << 30, prompt + 7 * k, dtype=np.int32)
            rows[scheduler.add(3 * round + k, tokens, max_tokens=length - len(tokens))] = tokens.tolist()
        for _ in range(steps):
            assert scheduler.schedule(plan)
            drawn = rng.integers(0, 1 << 30, 3, dtype=np.int32)
            ends = [plan.row_computed[row] + plan.row_len[row] for row in range(plan.num_rows)]
            for row, end in enumerate(ends):
                slot = plan.row_slot[row]
                if end == len(rows[slot]):
                    rows[slot].append(int(drawn[row]))
            scheduler.commit(plan, drawn)
        found = {slot: [] for slot in rows}
        assert scheduler.schedule(plan)
        scheduler.fail(plan, np.ones(3, np.uint8))
        while any(len(found[slot]) < len(rows[slot]) for slot in rows):  # the known tokens are computed again
            assert scheduler.schedule(plan)
            for row in range(plan.num_rows):
                begin = plan.row_start[row]
                found[plan.row_slot[row]] += np.asarray(plan.token_ids)[begin : begin + plan.row_len[row]].tolist()
            scheduler.commit(plan, np.full(3, 7, np.int32))
        for slot, tokens in rows.items():
            assert found[slot][: len(tokens)] == tokens
        for k in range(3):
            scheduler.abort(3 * round + k)
        assert scheduler.ledger()["slots"] == 0


def test_a_deleted_table_frees_its_memory():
    def held():
        with open("/proc/self/statm") as lines:
            return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def used(prompt):
        scheduler = Scheduler(
            max_slots=8, max_rows=8, max_tokens=64, max_model_len=1 << 17, num_blocks=9000, block_size=16
        )
        for k in range(8):
            scheduler.add(k, np.zeros(prompt, np.int32), max_tokens=5)

    for prompt in (10, 10000, 100000):
        used(prompt)
    before = held()
    for _ in range(20):
        for prompt in (10, 10000, 100000):
            used(prompt)
    assert held() - before < 8 << 20


def test_a_position_is_computed_again_with_the_token_that_was_just_committed():
    """The sample of the step launched before the redo is dropped."""
    scheduler = Scheduler(max_slots=1, max_rows=1, max_tokens=8, max_model_len=64, num_blocks=20, block_size=4)
    plans = [StepPlan(1, 8, 64) for _ in range(3)]
    scheduler.add(1, np.arange(4, dtype=np.int32), max_tokens=4)
    assert not scheduler.settler.redo(0), "nothing is in flight"
    scheduler.schedule(plans[0])
    scheduler.schedule(plans[1])
    scheduler.commit(plans[0], np.array([7], np.int32))
    assert scheduler.settler.redo(0)
    assert not scheduler.settler.redo(0)
    scheduler.schedule(plans[2])
    row = plans[2]
    assert (row.row_computed[0], row.row_len[0], row.token_ids[0]) == (4, 1, 7), "the host's token, not the device's"
    scheduler.commit(plans[1], np.array([8], np.int32))
    assert (plans[1].out_token[0], plans[1].out_finish[0]) == (-1, 0)
    scheduler.commit(plans[2], np.array([9], np.int32))
    assert plans[2].out_token[0] == 9
    for token in (10, 11):
        scheduler.schedule(plans[0])
        scheduler.commit(plans[0], np.array([token], np.int32))
    assert plans[0].out_finish[0] == 3
    assert scheduler.ledger()["slots"] == scheduler.pool.num_used == 0


def test_a_run_that_the_host_knows_replaces_what_a_preempted_rows_step_chooses():
    scheduler = Scheduler(max_slots=2, max_rows=2, max_tokens=16, max_model_len=64, num_blocks=7, block_size=4)
    plans = [StepPlan(2, 16, 64) for _ in range(2)]
    for number in (1, 2):
        scheduler.add(number, np.arange(number, number + 8, dtype=np.int32), max_tokens=9)
    for _ in range(4):
        scheduler.schedule(plans[0])
        scheduler.commit(plans[0], np.array([7, 7], np.int32))
    scheduler.schedule(plans[0])
    scheduler.schedule(plans[1])  # preempts the second row: the first row gets its blocks
    assert scheduler.num_preemptions == 1
    assert scheduler.settler.extend(1, np.array([8, 9], np.int32)), "its step is in flight, although it waits"
    scheduler.commit(plans[0], np.array([7, 99], np.int32))
    assert list(plans[0].out_token[:2]) == [7, -1]
    assert scheduler.settler.room(1) == 3, "four tokens chosen, two that were known"


@pytest.mark.parametrize("in_flight", [False, True])
def test_tokens_without_a_choice_follow_and_are_computed_in_one_step(in_flight):
    scheduler = Scheduler(max_slots=1, max_rows=1, max_tokens=8, max_model_len=64, num_blocks=20, block_size=4)
    plans = [StepPlan(1, 8, 64) for _ in range(3)]
    scheduler.add(1, np.arange(4, dtype=np.int32), max_tokens=6)
    scheduler.schedule(plans[0])
    if in_flight:
        scheduler.schedule(plans[1])
    scheduler.commit(plans[0], np.array([7], np.int32))
    settler = scheduler.settler
    assert settler.room(0) == 5
    with pytest.raises(ValueError, match="room for 5 tokens; got 5 and one more"):
        settler.extend(0, np.zeros(5, np.int32))
    assert settler.extend(0, np.array([8, 9, 10], np.int32)) is in_flight
    assert settler.room(0) == 2
    scheduler.schedule(plans[2])
    row = plans[2]
    if in_flight:
        assert (row.row_computed[0], row.row_len[0]) == (5, 3), "the step in flight computes the newest token"
        assert list(row.token_ids[:3]) == [8, 9, 10]
        scheduler.commit(plans[1], np.array([99], np.int32))
    else:
        assert (row.row_computed[0], row.row_len[0]) == (4, 4)
        assert list(row.token_ids[:4]) == [7, 8, 9, 10]
    if in_flight:
        assert (plans[1].out_token[0], plans[1].out_finish[0]) == (-1, 0), "what was chosen in their place is dropped"
    scheduler.commit(plans[2], np.array([11], np.int32))
    assert (plans[2].out_token[0], settler.room(0)) == (11, 1)
    scheduler.abort(1)
    assert settler.room(0) == 0
    with pytest.raises(ValueError, match="slots 0 to 0"):
        settler.room(1)
