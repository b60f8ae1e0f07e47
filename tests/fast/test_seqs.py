"""SeqTable: one reset covers every per-slot array, so nothing of a request is left for the next one (S37)."""

import re
from pathlib import Path

import numpy as np

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.seqs import SeqTable

DECLARED = (Path(__file__).resolve().parents[2] / "_fast" / "seqs.pxd").read_text()
ARRAY = re.compile(r"^    cdef (?:readonly )?\w+(?:\[::1\]|\*\*?) (\w+)(?:  # .*)?$", re.MULTILINE)
FIELDS = ARRAY.findall(DECLARED.split("# One value per slot")[1])


def test_the_snapshot_and_the_reset_name_every_declared_array():
    assert len(FIELDS) > 30
    assert list(SeqTable(1).snapshot(0)) == FIELDS
    reset = (Path(__file__).resolve().parents[2] / "_fast" / "seqs.pyx").read_text()
    reset = reset.split("cdef void reset(")[1].split("cdef slot_t find(")[0]
    for field in FIELDS:
        assert f"self.{field}[slot]" in reset, field


def test_a_slot_that_was_used_in_every_way_looks_new_afterwards():
    scheduler = Scheduler(
        max_slots=1, max_rows=1, max_tokens=8, max_model_len=64, num_blocks=20, block_size=4, policy=1
    )  # fmt: skip
    new = scheduler.seqs.snapshot(0)
    plan = StepPlan(1, 8, 64)
    entry = scheduler.add_entry(4)
    scheduler.add(
        9, np.arange(12, dtype=np.int32), max_tokens=30, min_tokens=2, eos_ids=[5], stop_ids=[6], priority=3,
        arrival=2.5, root=bytes(range(16)), keys=np.arange(12, dtype=np.int64),
        media=np.array([[0, 4, entry, 0], [5, 4, entry, 0]], np.int32),
    )  # fmt: skip
    for _ in range(6):
        scheduler.schedule(plan)
        scheduler.commit(plan, np.array([7], np.int32))
    scheduler.reset_prefix_cache()
    used = scheduler.seqs.snapshot(0)
    same = {name for name in FIELDS if used[name] == new[name]} - {"pending", "in_flight", "doomed", "void", "state"}
    assert same == {"order", "epoch"}, "this request should have touched every array"
    scheduler.abort(9)
    after = scheduler.seqs.snapshot(0)
    assert after.pop("epoch") > new.pop("epoch"), "plans of the former owner must not match the next one"
    assert after == new
