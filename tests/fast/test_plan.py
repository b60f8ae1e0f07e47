"""The plan's record as the device reads it: its layout, its used length, and the slots whose words it contains."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from _fast import layout
from _fast.layout import SLOT_WORDS, SlotWord, record_len, tail_at
from _fast.params import SlotParams
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

ROWS, TOKENS, UPDATES, WORDS = 4, 32, 64, SLOT_WORDS


def make(**changes):
    values = {"max_slots": 8, "max_rows": ROWS, "max_tokens": TOKENS, "max_model_len": 256, "num_blocks": 64}
    return Scheduler(**{**values, "block_size": 4, **changes})


def words_of(slot, salt=0):
    return np.array([slot, *(100 * slot + salt + k for k in range(1, WORDS))], np.int32)


def prompt(length, first=1):
    return np.arange(first, first + length, dtype=np.int32)


def read(record):
    """The parts of the record, found from its header and the two sizes alone, as a kernel finds them."""
    at, parts = 16, {}
    for name in ("slot", "start", "len", "computed", "flags"):
        parts[name] = record[at : at + ROWS + 1]
        at += ROWS + 1
    parts["tokens"] = record[at : at + TOKENS]
    at = -(-(at + TOKENS) // 16) * 16
    assert at == tail_at(ROWS, TOKENS)
    parts["updates"] = record[at : at + 4 * record[3]].reshape(-1, 4)
    at += 4 * record[3]
    parts["params"] = record[at : at + WORDS * record[7]].reshape(-1, WORDS)
    at += WORDS * record[7]
    if record[8]:
        assert record[8] == at
        parts["positions"] = record[at : at + 3 * record[1]].reshape(3, -1)
        at += 3 * record[1]
    assert record[9] == at
    return parts


def test_the_record_is_laid_out_as_its_docstring_says():
    memory = np.full(record_len(ROWS, TOKENS, UPDATES), 77, np.int32)
    scheduler, plan, params = make(), StepPlan(ROWS, TOKENS, UPDATES, memory), SlotParams(8)
    slots = [scheduler.add(k, prompt(n, 10 * k), max_tokens=9) for k, n in ((1, 6), (2, 5), (3, 30))]
    for slot in slots:
        params.stage(slot, words_of(slot))
    scheduler.schedule(plan)
    assert params.pack(plan) == 3
    positions = np.arange(3 * plan.num_tokens, dtype=np.int32).reshape(3, -1)
    memory[8] = plan.used_len
    memory[plan.used_len : plan.used_len + positions.size] = positions.reshape(-1)
    memory[9] += positions.size
    parts = read(memory)
    assert memory[:8].tolist() == [3, 32, 0, 2 + 2 + 6, 0, 0, 2, 3]
    assert parts["slot"][:3].tolist() == slots
    assert parts["start"][:4].tolist() == [0, 6, 11, 32]
    assert parts["len"][:3].tolist() == [6, 5, 21]
    assert parts["flags"][:3].tolist() == [1, 1, 0]
    assert parts["tokens"].tolist() == [*range(10, 16), *range(20, 25), *range(30, 51)]
    assert parts["updates"].tolist() == np.asarray(plan.updates)[: plan.num_updates].tolist()
    assert {(slot, index) for slot, index, _, _ in parts["updates"].tolist()} == {
        (slot, index) for slot, blocks in zip(slots, (2, 2, 6)) for index in range(blocks)
    }
    assert parts["params"].tolist() == [words_of(slot).tolist() for slot in slots]
    assert parts["positions"].tolist() == positions.tolist()
    assert plan.used_len == memory[9]


def test_the_built_modules_have_the_layout_of_this_tree():
    assert Path(layout.__file__).with_suffix(".pxd").read_text() == layout.declarations(), "python setup.py build_ext"
    assert SlotWord.SEED_HIGH == SlotWord.SEED_LOW + 1
    assert SlotWord.SEED_LOW % 2 == 0, "read as one int64"


def test_a_new_number_of_a_slot_is_one_member(tmp_path):
    """The record has room for the new number, and C has its name, without a change of another line."""
    last = f"OUTSIDE = {SlotWord.OUTSIDE}"
    added = "".join(f"\n    NEW_{k} = {len(SlotWord) + k}" for k in range(layout.ALIGNED))
    changed = tmp_path / "layout.py"
    changed.write_text(Path(layout.__file__).read_text().replace(last, last + added))
    found = runpy.run_path(str(changed))
    assert found["SLOT_WORDS"] == layout.SLOT_WORDS + 16
    assert found["record_len"](ROWS, TOKENS, UPDATES) == record_len(ROWS, TOKENS, UPDATES) + 16 * ROWS
    assert f"    SLOT_NEW_2 = {len(SlotWord) + 2}\n" in found["declarations"]()


def test_the_tail_has_room_for_everything_at_its_largest():
    size = record_len(ROWS, TOKENS, UPDATES)
    assert size >= tail_at(ROWS, TOKENS) + 4 * UPDATES + WORDS * ROWS + 4 * TOKENS
    assert size % 16 == 0, "records follow each other"


def test_a_view_of_the_updates_outlives_its_plan():
    plan = StepPlan(ROWS, TOKENS, UPDATES)
    view = np.asarray(plan.updates)
    assert view.shape == (UPDATES, 4)
    del plan
    view[:] = 5
    assert (view == 5).all()


def test_words_travel_once_and_only_for_slots_of_the_plan():
    scheduler, params = make(max_rows=2, max_slots=4), SlotParams(4)
    plans = [StepPlan(2, TOKENS, UPDATES) for _ in range(2)]
    slots = [scheduler.add(k, prompt(3), max_tokens=3) for k in range(3)]
    for slot in slots:
        params.stage(slot, words_of(slot))
    sent = []
    for turn in range(7):
        plan = plans[turn % 2]
        if not scheduler.schedule(plan):
            break
        count = params.pack(plan)
        assert plan.record[7] == count == plan.num_params
        at = plan.tail_at + 4 * plan.num_updates
        assert plan.used_len == at + WORDS * count
        sent += [plan.record[at + WORDS * k] for k in range(count)]
        scheduler.commit(plan, np.full(2, 7, np.int32))
        if turn == 0:
            assert sorted(sent) == sorted(slots[:2]), "the third has no row yet"
    assert sorted(sent) == sorted(slots)
    assert params.num_unsent == 0


def test_words_staged_again_travel_again_and_forgotten_ones_do_not():
    scheduler, params, plan = make(), SlotParams(8), StepPlan(ROWS, TOKENS, UPDATES)
    slot = scheduler.add(1, prompt(3), max_tokens=9)
    params.stage(slot, words_of(slot))
    params.stage(slot, words_of(slot, salt=1))
    assert params.num_unsent == 1
    scheduler.schedule(plan)
    assert params.pack(plan) == 1
    at = plan.tail_at + 4 * plan.num_updates
    assert list(plan.record[at : at + WORDS]) == words_of(slot, salt=1).tolist()
    scheduler.commit(plan, np.full(4, 7, np.int32))
    params.stage(slot, words_of(slot, salt=2))
    params.forget(slot)
    params.forget(slot)
    scheduler.schedule(plan)
    assert (params.pack(plan), params.num_unsent) == (0, 0)


def test_a_slots_words_are_sent_before_its_first_row_and_only_then():
    rng = np.random.default_rng(5)
    scheduler, params = make(max_slots=6, max_rows=3, num_blocks=40), SlotParams(6)
    plans = [StepPlan(3, TOKENS, UPDATES) for _ in range(2)]
    device, staged, number = {}, {}, 0
    for turn in range(400):
        if rng.random() < 0.4:
            slot = scheduler.add(number, prompt(int(rng.integers(1, 40))), max_tokens=int(rng.integers(1, 9)))
            if slot >= 0:
                staged[slot] = words_of(slot, salt=number)
                params.stage(slot, staged[slot])
                number += 1
        plan = plans[turn % 2]
        if scheduler.schedule(plan):
            params.pack(plan)
            at = plan.tail_at + 4 * plan.num_updates
            for line in np.asarray(plan.record)[at : plan.used_len].reshape(-1, WORDS).tolist():
                assert line[0] not in device, "written twice"
                device[line[0]] = line
            for slot in plan.row_slot[: plan.num_rows]:
                assert device[slot] == staged[slot].tolist()
            scheduler.commit(plan, np.full(3, 7, np.int32))
            for slot in scheduler.freed_slots[: scheduler.num_freed]:
                params.forget(slot)
                del device[slot], staged[slot]
    assert number > 50


def test_a_mistake_is_refused_in_words():
    scheduler, params, plan = make(), SlotParams(8), StepPlan(ROWS, TOKENS, UPDATES)
    with pytest.raises(ValueError, match="slots 0 to 7"):
        params.stage(8, words_of(8))
    with pytest.raises(ValueError, match="slot 3 has 32"):
        params.stage(3, words_of(2))
    with pytest.raises(ValueError, match="11 words"):
        params.stage(3, words_of(3)[:11])
    with pytest.raises(ValueError, match="follows schedule"):
        params.pack(plan)
    slot = scheduler.add(1, prompt(3), max_tokens=9)
    params.stage(slot, words_of(slot))
    scheduler.schedule(plan)
    params.pack(plan)
    with pytest.raises(ValueError, match="follows schedule"):
        params.pack(plan)
