"""Idle rows: behind every other request, in a step only as far as the budgets for them allow, preempted first."""

from __future__ import annotations

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import IDLE, Scheduler
from engine.base import request

ROWS = 8


class Rows:
    """A scheduler whose samples are always 7."""

    def __init__(self, policy: int = 0, num_blocks: int = 256, max_rows: int = ROWS, max_tokens: int = 128) -> None:
        self.scheduler = Scheduler(
            max_slots=64, max_rows=max_rows, max_tokens=max_tokens, max_model_len=256, num_blocks=num_blocks,
            block_size=4, policy=policy, prefix_caching=False,
        )  # fmt: skip
        self.plan = StepPlan(max_rows, max_tokens, 4096)
        self._count = 0

    def ask(self, length: int = 4, max_tokens: int = 200, priority: int = 0, flow: int = 0) -> int:
        """Adds a request; returns its slot."""
        self._count += 1
        tokens = np.arange(self._count, self._count + length, dtype=np.int32)
        return self.scheduler.add(
            self._count, tokens, max_tokens=max_tokens, priority=priority, arrival=float(self._count), flow=flow
        )

    def idle(self, length: int = 4, max_tokens: int = 200) -> int:
        return self.ask(length, max_tokens, IDLE)

    def step(self) -> dict[int, int]:
        """Runs a step; returns the number of tokens by slot."""
        rows = self.scheduler.schedule(self.plan)
        found = dict(zip(self.plan.row_slot[:rows], self.plan.row_len[:rows]))
        self.scheduler.commit(self.plan, np.full(ROWS, 7, np.int32))
        return found

    def allow(self, rows: int, tokens: int) -> None:
        self.scheduler.shares.idle_rows, self.scheduler.shares.idle_budget = rows, tokens


def test_the_engine_and_the_scheduler_mean_the_same_number():
    assert request.IDLE == IDLE


@pytest.mark.parametrize("policy", [0, 1])
def test_an_idle_request_starts_after_all_others_whatever_came_first(policy):
    rows = Rows(policy, max_rows=2)
    early = rows.idle(max_tokens=2)
    others = [rows.ask(max_tokens=2, priority=IDLE - 1 if policy else 0) for _ in range(3)]
    assert rows.step().keys() == {*others[:2]}
    order = [slot for _ in range(6) for slot in rows.step()]
    assert order.index(others[2]) <= order.index(early)


@pytest.mark.parametrize("policy", [0, 1])
def test_idle_rows_give_their_rows_to_those_who_wait(policy):
    rows = Rows(policy)
    idle = [rows.idle() for _ in range(ROWS)]
    assert rows.step().keys() == {*idle}
    others = [rows.ask() for _ in range(3)]
    ran = rows.step()
    assert ran.keys() == {*idle[:-3], *others}
    assert rows.scheduler.num_preemptions == 3
    assert rows.step().keys() == {*idle[:-3], *others}  # preempted rows wait behind


def test_idle_rows_give_their_blocks_first_and_finish_later():
    rows = Rows(num_blocks=24)
    first = rows.ask(40, 30)
    idle = [rows.idle(16, 20), rows.idle(12, 20)]
    rows.step()
    wide = rows.ask(40, 4)
    assert wide in rows.step()
    assert rows.scheduler.num_preemptions >= 1
    ended = set()
    for _ in range(120):
        ran = rows.step()
        ended |= set(rows.scheduler.freed_slots[: rows.scheduler.num_freed])
        assert first in ran or first in ended
    assert ended == {first, wide, *idle}
    ledger = rows.scheduler.ledger()
    assert (ledger["used"], ledger["slots"], ledger["running"], ledger["waiting"]) == (0, 0, 0, 0)


def test_only_so_many_idle_rows_run_with_others_and_the_rest_pause():
    rows = Rows()
    idle = [rows.idle() for _ in range(4)]
    rows.step()
    other = rows.ask()
    rows.step()
    rows.allow(2, 0)
    assert rows.step().keys() == {other, *idle[:2]}
    rows.allow(0, 0)
    assert rows.step().keys() == {other}
    assert rows.scheduler.num_preemptions == 0
    rows.allow(4, 0)
    assert rows.step() == dict.fromkeys((other, *idle), 1)


def test_idle_prompts_take_what_the_budget_leaves():
    rows = Rows(max_tokens=64)
    long, other = rows.idle(100), rows.ask(30)
    rows.allow(8, 48)
    assert rows.step() == {other: 30, long: 18}
    rows.allow(8, 20)
    assert rows.step() == {other: 1, long: 20}
    rows.allow(8, 0)
    more = rows.idle(10)
    assert rows.step() == {other: 1}
    rows.allow(1, 64)
    assert more not in rows.step()  # a second idle row may not start
    rows.allow(8, 64)
    assert rows.step().keys() >= {other, more}


def test_waiting_requests_have_their_tokens_before_idle_prompts():
    rows = Rows(max_tokens=40)
    idle = rows.idle(100)
    rows.allow(8, 40)
    assert rows.step() == {idle: 40}
    other = rows.ask(38)
    assert rows.step() == {other: 38, idle: 2}


def test_idle_rows_pay_no_turns_and_do_not_make_their_caller_wait():
    rows = Rows(max_rows=1)
    rows.ask(max_tokens=1, flow=1)
    rows.step()
    for _ in range(4):
        rows.idle(40, 40)
    for _ in range(50):
        rows.step()
    assert rows.scheduler.queue.turns.owed(0) == 0


def test_load_counts_idle_rows_only_without_others():
    rows = Rows()
    shares = rows.scheduler.shares
    assert (shares.any_idle(), shares.any_client()) == (False, False)
    for _ in range(2):
        rows.idle(10)
    assert shares.load() == (0, 2, 20, 10)
    rows.step()
    assert (shares.load(), shares.num_idle_decoding()) == ((2, 0, 0, 0), 2)
    rows.ask(30)
    assert shares.load() == (0, 1, 30, 30)
    assert (shares.any_idle(), shares.any_client()) == (True, True)
    rows.step()
    rows.idle(5)
    assert shares.load() == (1, 0, 0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_walk_of_both_kinds_ends_every_request_and_never_idles_a_client(seed):
    """Clients' rows run in each step that has any; all requests end; budgets hold."""
    random = np.random.default_rng(seed)
    rows = Rows(policy=seed % 2, num_blocks=64, max_tokens=48)
    kinds: dict[int, bool] = {}
    ended = 0
    for turn in range(400):
        if turn < 250 and len(kinds) < 40 and random.random() < 0.4:
            is_idle = bool(random.random() < 0.6)
            length, most = int(random.integers(1, 60)), int(random.integers(1, 40))
            kinds[rows.idle(length, most) if is_idle else rows.ask(length, most)] = is_idle
        allowed = int(random.integers(0, ROWS)), int(random.integers(0, 48))
        clients = [slot for slot, is_idle in kinds.items() if not is_idle]
        rows.allow(*(allowed if clients else (2**31 - 1, 2**31 - 1)))
        ran = rows.step()
        if clients:
            assert any(slot in ran for slot in clients)
            assert sum(kinds[slot] for slot in ran) <= allowed[0]
        for slot in rows.scheduler.freed_slots[: rows.scheduler.num_freed]:
            del kinds[slot]
            ended += 1
    rows.allow(2**31 - 1, 2**31 - 1)
    for _ in range(600):
        rows.step()
        for slot in rows.scheduler.freed_slots[: rows.scheduler.num_freed]:
            del kinds[slot]
    assert not kinds
    assert rows.scheduler.ledger()["used"] == 0
