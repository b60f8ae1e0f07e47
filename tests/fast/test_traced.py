"""Traced rows end when every token, including the last, has been computed; their blocks still hold all tokens.

The walk stores what a device would store: the block tables after the plans' changes, and the token at each place of a
block. When the slot of a traced row is freed, the places of its table hold its prompt and every reported token.
"""

import random

import numpy as np
import pytest

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from tests.fast.test_scheduler import LENGTH, STOP, ids, make, plan_for, rows

EOS, BLOCK, COMPLETE = 9, 4, 7


def test_a_row_that_ends_by_its_length_computes_its_last_token_before_its_slot_comes_back():
    scheduler = make()
    slot = scheduler.add(5, ids(1, 2, 3), max_tokens=1, traced=True)
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    assert scheduler.schedule(two) == 0  # the request needs no further token
    scheduler.commit(one, ids(7))
    assert (one.out_token[0], one.out_finish[0], scheduler.num_freed) == (7, LENGTH, 0)
    scheduler.schedule(two)
    assert rows(two) == {slot: (3, 1, 0)}
    assert two.token_ids[0] == 7
    scheduler.commit(two, ids(8))
    assert (two.out_token[0], two.out_finish[0], scheduler.num_freed) == (-1, 0, 1)
    assert (scheduler.freed_slots[0], scheduler.freed_lens[0]) == (slot, 4)
    assert scheduler.ledger()["slots"] == 0


def test_a_row_that_ends_by_a_token_needs_no_step_beyond_those_in_flight():
    scheduler = make()
    scheduler.add(1, ids(1, 2), max_tokens=8, eos_ids=[7], traced=True)
    one, two = plan_for(scheduler), plan_for(scheduler)
    scheduler.schedule(one)
    scheduler.schedule(two)
    scheduler.commit(one, ids(7))
    assert (one.out_finish[0], scheduler.num_freed) == (STOP, 0)
    assert scheduler.schedule(plan_for(scheduler)) == 0
    scheduler.commit(two, ids(3))
    assert (two.out_token[0], two.out_finish[0]) == (-1, 0)
    assert (scheduler.num_freed, scheduler.freed_lens[0]) == (1, 3)


def test_a_prompt_that_fills_the_context_leaves_no_room_to_compute_a_token():
    scheduler = make(max_model_len=8)
    assert scheduler.add(1, ids(*range(7)), max_tokens=9, traced=True) == 0
    with pytest.raises(ValueError, match="prompt of 8 tokens"):
        scheduler.add(2, ids(*range(8)), max_tokens=1, traced=True)
    assert make(num_blocks=3).add(1, ids(*range(7)), max_tokens=2, traced=True) == -2
    assert make(num_blocks=3).add(1, ids(*range(7)), max_tokens=2) == 0


class Walk:
    """A random walk with one group of few blocks, and two steps in flight."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        settings = {"max_slots": 7, "max_rows": 4, "max_tokens": 12, "max_model_len": 40, "block_size": BLOCK}
        self.scheduler = Scheduler(**settings, num_blocks=self.rng.choice([12, 16, 40]), max_chunk=5)
        self.plans = [StepPlan(4, 12, 400) for _ in range(3)]
        self.tables = np.zeros((7, 10), np.int64)
        self.held: dict[tuple[int, int], int] = {}  # (block, place in it) -> token
        self.last = [0] * 7  # per slot: the newest sample, on the device
        self.slot_of: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}  # per request: its prompt and its reported tokens
        self.open: set[int] = set()  # requests that still generate
        self.launched: list[tuple[StepPlan, list[int]]] = []
        self.number = self.read = 0

    def add(self):
        prompt = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 20))]
        most, number = self.rng.choice([1, 2, 9, 30]), self.number
        slot = self.scheduler.add(number, ids(*prompt), max_tokens=most, eos_ids=[EOS], traced=number % 3 > 0)
        self.number += 1
        if slot >= 0:
            self.slot_of[slot] = number
            self.tokens[number] = prompt
            self.open.add(number)

    def end(self):
        """Aborts a request, at once or when all its tokens are computed."""
        if self.open:
            number = self.rng.choice(sorted(self.open))
            self.open.discard(number)
            assert self.scheduler.abort(number, when_computed=self.rng.random() < 0.7)
            self.take_slots()

    def launch(self):
        plan = next(plan for plan in self.plans if all(plan is not other for other, _ in self.launched))
        if not self.scheduler.schedule(plan):
            return
        for slot, index, block, _ in np.asarray(plan.updates)[: plan.num_updates]:
            self.tables[slot, index] = block
        drawn = []
        for row in range(plan.num_rows):
            slot, flags = plan.row_slot[row], plan.row_flags[row]
            for k in range(plan.row_len[row]):
                token, at = plan.token_ids[plan.row_start[row] + k], plan.row_computed[row] + k
                token = self.last[slot] if flags & 2 and k == 0 else token
                self.held[int(self.tables[slot, at // BLOCK]), at % BLOCK] = token
            drawn.append(self.rng.choice([EOS, 0, 1, 2, 3, 4, 5, 6]))
            if flags & 1:
                self.last[slot] = drawn[-1]
        self.launched.append((plan, drawn))

    def settle(self):
        plan, drawn = self.launched.pop(0)
        if self.rng.random() < 0.02:
            self.scheduler.fail(plan)
        else:
            samples = np.asarray(plan.row_flags)[: plan.num_rows] & 1
            # A grammar ends some rows without a token.
            ends = ids(*[self.rng.random() < 0.03 for _ in drawn]) * COMPLETE * samples
            self.scheduler.commit(plan, np.where(ends, ids(-1), ids(*drawn)), ends)
        for row in range(plan.num_rows):
            number = plan.out_request[row]
            if number in self.open and plan.out_token[row] >= 0:
                self.tokens[number].append(plan.out_token[row])
            if plan.out_finish[row]:
                self.open.discard(number)
        self.take_slots()

    def take_slots(self):
        lens = list(self.scheduler.freed_lens)
        for place, slot in enumerate(list(self.scheduler.freed_slots[: self.scheduler.num_freed])):
            number = self.slot_of.pop(slot)
            assert number not in self.open
            if lens[place]:
                found = [self.held[int(self.tables[slot, at // BLOCK]), at % BLOCK] for at in range(lens[place])]
                assert found == self.tokens[number]
                self.read += 1


@pytest.mark.parametrize("seed", range(12))
def test_the_blocks_of_a_traced_row_hold_all_its_tokens_when_its_slot_comes_back(seed):
    walk = Walk(seed)
    for turn in range(1500):
        if turn < 1300 and walk.rng.random() < 0.2:
            walk.add()
        if walk.rng.random() < 0.03:
            walk.end()
        if len(walk.launched) < 2:
            walk.launch()
        if walk.launched and (len(walk.launched) == 2 or walk.rng.random() < 0.3):
            walk.settle()
    assert not walk.slot_of, "a row never ended"
    assert walk.read > 40
    ledger = walk.scheduler.ledger()
    assert ledger["slots"] == ledger["used"] == ledger["in_flight"] == 0
