"""Random walks of the scheduler for rows with drafts: runs of random length, two steps in flight.

Like test_scheduler_walk.py. The device alone knows a row's place while a step is in flight: it has lengths of its own,
finds a random number of drafts, and accepts a random number of them.
"""

import numpy as np
import pytest

from _fast.layout import RunEnd, TokenCode
from _fast.plan import StepPlan
from tests.fast.oracles.device import EXACT, FEED, SAMPLE, Device
from tests.fast.test_scheduler_walk import ERROR, NONE, Walk


class DraftDevice(Device):
    """Also has the number of tokens of each slot and its drafts; `width`: places of a row's run."""

    def __init__(self, rng, groups, block_size, draw, width=0):
        super().__init__(rng, groups, block_size, draw)
        self.width = width
        self.length = {}  # by slot, as the next
        self.found = {}
        self.fresh = set()  # slots whose drafts follow their newest tokens
        self.shares = {}  # by row of the step: drafts
        self.verified = {}  # (step, row) -> drafts, accepted drafts
        self.longest = 0

    def run(self, plan, requests, fails):
        """Deals the step's drafts out at random, prefixes of each row's drafts, before the rows run."""
        self.shares = dict.fromkeys(range(plan.num_rows), 0)
        has = []
        for row in range(plan.num_rows):
            slot, count = plan.row_slot[row], plan.row_len[row]
            if plan.row_flags[row] & FEED and count > 1:
                known = len(requests[slot].tokens)
                most = min(self.found[slot], count - 1, requests[slot].last_place - known)
                has += [row] * max(0, most)
        places = plan.num_tokens - plan.row_start[plan.num_rows]
        for row in self.rng.sample(has, min(places, len(has))):
            self.shares[row] += 1
        return super().run(plan, requests, fails)

    def _row(self, plan, row, request, runs):
        slot, count, flags = plan.row_slot[row], plan.row_len[row], plan.row_flags[row]
        at, start = plan.row_start[row], plan.row_computed[row]
        assert plan.row_start[row + 1] == at + (count if not flags & FEED else 1)
        drafts = 0
        if flags & FEED:
            assert plan.token_ids[at] == -1
            begin = start if flags & EXACT else self.length[slot] - 1
            assert start <= begin == len(request.tokens) - 1, "the record has a minimum"
            drafts = self.shares[row]
            assert not drafts or slot in self.fresh, "these drafts were found for an older text"
            start, count = begin, 1
        elif not request.broken:
            assert list(plan.token_ids[at : at + count]) == request.tokens[start : start + count]
        assert start == request.computed, "a position is skipped or computed twice"
        self._read_media(request, start, count, at, runs)
        run = []
        if flags & SAMPLE:
            assert start + count == len(request.tokens)
            accepted = self.rng.randint(0, drafts)
            run = [self.draw(request) for _ in range(1 + accepted)]
            request.tokens += run
            assert plan.drafting or not drafts
            self.fresh.discard(slot)
            if plan.drafting:
                self.fresh.add(slot)
                self.length[slot] = len(request.tokens)
            self.found[slot] = self.rng.choice([0, self.rng.randint(0, self.width), self.width - 2])
            self.verified[plan.step_id, row] = drafts, accepted
            self.longest = max(self.longest, len(run))
        inside = min(count + max(len(run) - 1, 0), request.last_place - start)  # later places have no block
        for group in range(len(self.groups)):
            self._read_write(request, group, slot, start, inside)
            self.spoil(request, group, slot, start + inside, drafts - max(len(run) - 1, 0))
        request.computed = start + count + max(len(run) - 1, 0)
        code = self.found.get(slot, 0) + RunEnd.VERIFIED * drafts if plan.drafting else 0
        return run + [int(TokenCode.END) - code] * (self.width - len(run))

    def spoil(self, request, group, slot, start, count):
        """Refused drafts were written, too."""
        for position in range(start, min(start + count, request.last_place)):
            self.kv[self.tables[group][slot, position // self.block_size], position % self.block_size] = None


class DraftWalk(Walk):
    """Some requests have drafts."""

    resting = 0.7  # share of walks whose drafter may rest

    def __init__(self, seed, **fixed):
        super().__init__(seed, **fixed)
        self.width = self.rng.randint(3, 9)
        self.counts = [0, 0, 0]
        sizes = self.settings["max_rows"], self.settings["max_tokens"]
        self.plans = [StepPlan(*sizes, plan.max_updates, width=self.width) for plan in self.plans]
        self.device = DraftDevice(self.rng, self.groups, self.block_size, self.draw, self.width)
        if seed % 3:
            self.set_budget()

    def set_budget(self):
        """Random times of steps; some drafters may rest, and the batch's size may limit the drafts."""
        times = [sorted(self.rng.random() + 0.2 for _ in range(40)) for _ in range(3)]
        cheap = self.rng.choice([0.1, 0.5, 1.0])
        times[0] = [0.1 + value * cheap for value in times[0]]
        budget = self.scheduler.drafts.budget
        budget.set_times(*(np.array(values) for values in times))
        if self.rng.random() < self.resting:
            budget.let_rest(1)
        if self.rng.random() < 0.3:
            budget.set_most([(1, 2, self.width - 2), (3, 4, 1), (5, 9, 0)])

    def hints(self, length):
        return {"drafts": self.rng.choice([0, 1, self.width - 2, self.width - 2])}

    def add(self):
        super().add()
        for slot, request in self.by_slot.items():
            request.last_place = self.scheduler.seqs.snapshot(slot)["max_len"] - 1

    def check_plan(self, plan, before):
        super().check_plan(plan, before)
        assert plan.variant == (self.scheduler.drafts.budget.variant if plan.drafting else 0)
        running = [slot for slot, facts in before.items() if facts["state"] == 2]
        if any(before[slot]["epoch"] != self.scheduler.seqs.snapshot(slot)["epoch"] for slot in running):
            assert all(before[s]["pending"] == before[s]["choosing"] for s in running), "drafts have preempted a row"
            for slot in plan.row_slot[: plan.num_rows]:
                facts = self.scheduler.seqs.snapshot(slot)
                if facts["choosing"] and facts["drafts"] and self.groups:
                    entries = len(self.scheduler.tables.row(slot))
                    assert entries <= -(-facts["computed"] // self.block_size) + 1, "blocks of refused drafts remain"

    def check_shares(self, plan, before, after):
        if all(facts["pending"] == facts["choosing"] for facts in before.values()):
            super().check_shares(plan, before, after)

    def check_row(self, plan, row, run, forced, broken, old):
        request, why = self.by_slot[plan.row_slot[row]], plan.out_finish[row]
        emitted = [plan.out_token[row * self.width + k] for k in range(plan.out_count[row])]
        assert plan.out_request[row] == request.number
        if request.number not in self.live:
            assert (emitted, why) == ([], NONE)
            return
        expected, ended = [], forced
        if broken:
            ended = ERROR
        elif plan.row_flags[row] & SAMPLE:
            tokens = [token for token in run if token >= 0]
            for number, token in enumerate(tokens, 1):
                request.settled += 1
                expected.append(token)
                assert token == request.tokens[request.settled - 1]
                ended = request.verdict(self.settings["max_model_len"])
                if forced and number == len(tokens):
                    ended = forced
                if ended:
                    break
        assert (emitted, why) == (expected, ended)
        if plan.row_flags[row] & SAMPLE and not broken:
            drafts, accepted = self.device.verified[plan.step_id, row]
            self.counts = [a + b for a, b in zip(self.counts, (drafts > 0, drafts, accepted))]
        if why:
            del self.live[request.number]
            self.ended += 1

    def fail(self, plan):
        slots = super().fail(plan)
        for slot in slots:
            self.device.length.pop(slot, None)
        return slots


@pytest.mark.parametrize("seed", range(80))
def test_rows_with_drafts_read_their_own_prefix_and_end_once(seed):
    walk = DraftWalk(seed)
    walk.run(120)
    drafts = walk.scheduler.drafts
    assert [drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens] == walk.counts
    assert sum(drafts.accepted_per_place) == walk.counts[2]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_never_preempt(seed):
    walk = DraftWalk(seed, num_blocks=28, block_size=4, groups=[(0, 0)], max_rows=6, max_slots=9, max_tokens=40)
    walk.run(150, arrivals=0.9, aborts=0.01)
    assert walk.scheduler.num_preemptions > 0
    assert walk.device.longest > 1 or walk.scheduler.drafts.budget.adaptive


@pytest.mark.parametrize("seed", range(20))
def test_a_step_with_drafts_that_fails_ends_or_restarts_its_rows(seed):
    DraftWalk(seed).run(100, failing=0.1, sparing=0.5)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(1000, 3000))
def test_the_long_form_of_the_walk_with_drafts(seed):
    small = {} if seed % 3 else {"groups": [(0, 0)], "num_blocks": 1 + 64 // (1 + seed % 4), "block_size": 1 + seed % 4}
    DraftWalk(seed, **small).run(500, failing=seed % 2 * 0.02, sparing=seed % 5 * 0.2)
