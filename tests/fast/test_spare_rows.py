"""The scheduler reserves its last rows for callers without a row while several callers send requests."""

from __future__ import annotations

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

ROWS = 64
LONG = 400
ALONE_AFTER = 4096  # consecutive requests of one caller


class Rows:
    """A scheduler; answers end at max_tokens."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            max_slots=4 * ROWS, max_rows=ROWS, max_tokens=512, max_model_len=512, num_blocks=4096, block_size=16
        )
        self.plan = StepPlan(ROWS, 512, 8192)
        self._count = 0

    def ask(self, flow: int, count: int = 1, max_tokens: int = LONG) -> int:
        """Adds `count` requests; returns the slot of the last one."""
        for _ in range(count):
            self._count += 1
            slot = self.scheduler.add(self._count, np.arange(4, dtype=np.int32), max_tokens=max_tokens, flow=flow)
        return slot

    def step(self) -> list[int]:
        """Runs a step; returns the slots of its rows."""
        rows = self.scheduler.schedule(self.plan)
        slots = list(self.plan.row_slot[:rows])
        self.scheduler.commit(self.plan, np.full(ROWS, 7, np.int32))
        return slots


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_a_caller_alone_takes_all_rows(rows):
    rows.ask(0, 100)
    assert len(rows.step()) == ROWS


def test_who_asks_now_and_then_begins_with_the_next_step(rows):
    rows.ask(1, max_tokens=1)
    rows.ask(0, 100)
    rows.step()
    for _ in range(20):
        assert len(rows.step()) == ROWS - 1
        slot = rows.ask(1, max_tokens=2)
        assert slot in rows.step()
        rows.step()


def test_callers_that_have_no_row_take_all_that_there_are(rows):
    rows.ask(0, ROWS - 1)
    rows.step()
    slots = [rows.ask(flow) for flow in (1, 2)]
    rows.ask(0, 10)
    found = rows.step()
    assert len(found) == ROWS
    assert [slot in found for slot in slots] == [True, False]


def test_a_caller_that_no_other_follows_takes_all_rows_again(rows):
    rows.ask(1, max_tokens=1)
    for _ in range(ALONE_AFTER // ROWS - 1):
        rows.ask(0, ROWS, max_tokens=1)
        rows.step()
        rows.step()
    rows.ask(0, ROWS)
    assert len(rows.step()) == ROWS - 1
    rows.ask(0)
    assert len(rows.step()) == ROWS
