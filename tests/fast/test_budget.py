"""The budget of drafts: its maximum, the steps of servers whose drafts are never, always or again right, its limits."""

import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from _fast.budget import Budget
from _fast.layout import Acceptance, RunEnd, TokenCode
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

END, ONE = int(TokenCode.END), int(Acceptance.ONE)
MOST = 4  # drafts of a row


def survivals_of(draw, rows, most):
    """Random survivals of rows, which fall along a row; some are equal."""
    found = []
    for _ in range(rows):
        own, value = [], ONE
        for _ in range(draw.randint(0, most)):
            value = max(value * draw.choice([ONE - 1, ONE // 2, draw.randint(512, ONE - 1)]) // ONE, 1)
            own.append(value)
        found.append(own)
    return found


class Costs(NamedTuple):
    """Seconds of steps."""

    plain: list[float]
    mixed: list[float]
    choice: list[float]
    fixed: float
    first: list[float] = []
    further: list[float] = []
    pass_fixed: float = 0.0

    def passes(self, rows, depth, drafted):
        """Of passes over so many of the rows with drafts."""
        if not self.first:
            return 0.0
        reading = self.pass_fixed * rows / drafted
        number = (depth - 1) if self.further else 0
        further = number * (self.further[min(rows, len(self.further) - 1)] + reading) if number else 0.0
        return self.first[min(rows, len(self.first) - 1)] + reading + further

    def speed(self, survivals, given, depth):
        """The most tokens per second with at least a draft and at most `depth` of a row, and the number of drafts."""
        rows, tokens, most, _ = given
        ranked = sorted((value for row in survivals for value in row[:depth]), reverse=True)
        drafted, best = sum(1 for row in survivals if row), (0.0, 0)
        for count in range(1, min(len(ranked), most) + 1):
            seconds = self.mixed[min(tokens + count, len(self.mixed) - 1)]
            seconds += self.choice[min(rows + count, len(self.choice) - 1)] + self.fixed
            seconds += self.passes(min(count, drafted), depth, drafted)
            best = max(best, ((rows * ONE + sum(ranked[:count])) / seconds, -count))
        return best[0], -best[1]

    def best(self, survivals, given):
        """(drafts, depth): of the fastest step; the depth rises while a further pass pays."""
        rows, tokens, _, decodes = given
        seconds = self.mixed[min(tokens, len(self.mixed) - 1)] + self.choice[min(rows, len(self.choice) - 1)]
        if decodes:
            seconds = self.plain[min(tokens, len(self.plain) - 1)]
        deepest = max(map(len, survivals), default=0)
        tried = [(*self.speed(survivals, given, depth), depth) for depth in range(1, deepest + 1)]
        if not self.further:
            tried = tried[-1:]
        while len(tried) > 1 and any(after[0] <= one[0] for one, after in pairwise(tried)):
            tried.pop()
        fastest = max(tried, key=lambda one: (one[0], -one[2]), default=(0.0, 0, 0))
        return fastest[1:] if fastest[0] > rows * ONE / (seconds + self.fixed) else (0, 0)


@pytest.mark.parametrize("kind", ["copies", "block", "chain"])
def test_the_number_of_drafts_is_the_maximum_of_tokens_per_second(kind):
    draw, seen, depths = random.Random(3), set(), set()
    for case in range(400):
        budget = Budget(8, 40)
        rows = draw.randint(1, 40)
        sizes = draw.randint(1, 60), draw.randint(1, 300), draw.randint(1, 200)
        times = [sorted(draw.random() * 0.02 + 0.004 for _ in range(size)) for size in sizes]
        part = draw.choice([3, 50])
        times[2] = [value / part for value in times[2]] if case % 2 else [0.0005] * sizes[2]
        budget.set_times(*(np.array(values) for values in times))
        survivals = survivals_of(draw, rows, draw.choice([1, 3, 7]))
        given = rows, rows + draw.choice([0, 0, 30]), draw.choice([0, 5, 500]), draw.random() < 0.7
        contexts, reading = draw.choice([0, 4096, 1 << 40]), draw.choice([0.0, 2.0**-20])
        budget.times.set_reading(reading)
        costs = Costs(*times, reading * contexts)
        if kind != "copies":
            passes = [sorted(draw.random() * draw.choice([1e-4, 1e-3, 1e-2]) for _ in range(41)) for _ in range(2)]
            costs = costs._replace(first=passes[0], pass_fixed=2.0**-24 * contexts)
            if kind == "chain":
                costs = costs._replace(further=passes[1])
            budget.times.set_passes(np.array(costs.first), np.array(costs.further), 2.0**-24)
        found, depth = budget.sized(survivals, *given, contexts)
        assert (found, depth) == costs.best(survivals, given), case
        seen.add(0 if not found else 2 if found == min(sum(map(len, survivals)), given[2]) else 1)
        depths.add(depth - max(map(len, survivals)) if found else None)
    assert seen == {0, 1, 2}
    assert depths >= ({0, -1, -2} if kind == "chain" else {0}), depths


def test_a_pass_that_few_drafts_need_is_left_out():
    """Eight rows whose first draft is almost sure: a further pass pays only while its drafts are likely enough."""
    budget, times = Budget(8, 8), 0.01 + 0.0002 * np.arange(65)
    budget.set_times(times, times, np.zeros(1))
    chances = (0.9, 0.8, 0.7), (0.9, 0.5, 0.3), (0.9, 0.1, 0.05)
    sure, likely, unlikely = ([int(one * ONE) for one in row] for row in chances)
    for pass_s, wanted in ((0.0002, (3, 3, 1)), (0.001, (3, 2, 1)), (0.005, (2, 1, 1)), (0.05, (0, 0, 0))):
        budget.times.set_passes(np.full(9, pass_s), np.full(9, pass_s))
        assert tuple(budget.sized([row] * 8, 8, 8, 64, True)[1] for row in (sure, likely, unlikely)) == wanted, pass_s


class Server:
    """A scheduler with rows that decode, two steps in flight, and a device whose drafts are right or wrong."""

    def __init__(self, rows, marginal, rests=True):
        """marginal: seconds per token, in addition to 1 s for a step."""
        self.scheduler = Scheduler(
            max_slots=rows, max_rows=rows, max_tokens=rows * (1 + MOST), max_model_len=5000, num_blocks=rows * 320,
            block_size=16, prefix_caching=False,
        )  # fmt: skip
        self.budget = self.scheduler.drafts.budget
        self.budget.set_times(*(1 + marginal * np.arange(rows * (1 + MOST) + 1) for _ in range(2)), np.zeros(1))
        if rests:
            self.budget.let_rest(1)
        self.plans = [StepPlan(rows, rows * (1 + MOST), rows * 320, width=MOST + 2) for _ in range(2)]
        for number in range(rows):
            self.scheduler.add(number, np.ones(1, np.int32), max_tokens=4999, drafts=MOST)
        self.flying, self.numbers = None, []  # of drafts, by step; -1: the drafter rested
        self.depths = []  # most drafts of a row, by step

    def run(self, steps, right):
        """Run steps; `right`: how many drafts of a row are right."""
        for _ in range(steps):
            plan = self.plans[self.scheduler.next_step % 2]
            assert self.scheduler.schedule(plan)
            drafts = plan.num_tokens - plan.num_rows
            self.depths.append(plan.depth)
            self.numbers.append(drafts if plan.drafting else -1)
            runs = np.full((plan.num_rows, plan.width), END, np.int32)
            runs[:, 0] = 7
            for row in range(plan.num_rows):  # even shares: all rows have the same estimates
                own = min(plan.row_len[row] - 1, -(-drafts // (plan.num_rows - row)))
                drafts -= own
                runs[row, : 1 + min(own, right)] = 7
                runs[row, 1 + min(own, right) :] -= (MOST + RunEnd.VERIFIED * own) * plan.drafting
            if self.flying is not None:
                self.scheduler.commit(*self.flying)
            self.flying = plan, runs.reshape(-1)


def test_a_server_whose_drafts_are_never_right_ends_with_plain_steps():
    server = Server(8, 0.1)  # 8 drafts more cost 0.8 s of 1.8 s
    server.run(400, 0)
    drafted = [step for step, number in enumerate(server.numbers) if number > 0]
    first_rest = server.numbers.index(-1)
    assert first_rest < 20
    probes = [step for step in drafted if step > first_rest]
    assert [server.numbers[step] for step in probes] == [8] * len(probes)
    # Between: 16, 32, 64 ... steps of rest, and those until the drafts are found, verified and settled.
    assert [after - before for before, after in pairwise(probes)] == [32 + 5, 64 + 5, 128 + 5]
    assert server.budget.rest.num_probes == len(probes) == 4
    assert set(server.numbers[probes[-1] + 2 :]) == {-1}


@pytest.mark.parametrize("rests", [True, False])
def test_a_server_whose_drafts_are_always_right_verifies_all(rests):
    server = Server(8, 0.1, rests)
    server.run(120, MOST)
    assert server.numbers[:3] == [0, 0, 2 * 8]  # the prompts; a step before drafts are known; 0.75 are right at first
    assert set(server.numbers[60:]) == {8 * MOST}


@pytest.mark.parametrize("rests", [True, False])
def test_drafts_that_are_right_again_are_used_again(rests):
    server = Server(8, 0.1, rests)
    server.run(24, 0)
    assert server.numbers[-1] == (-1 if rests else 0)
    server.run(96, MOST)
    assert set(server.numbers[-20:]) == {8 * MOST}


def test_a_row_gets_deeper_drafts_as_soon_as_fewer_rows_run():
    """A pass takes as long as 4 tokens for each of its rows: with 8 rows it is worth only likely drafts."""
    server = Server(8, 0.1, rests=False)
    server.budget.times.set_passes(0.05 * np.arange(9), 0.4 * np.arange(9))
    server.run(60, 1)  # one draft of a row is right
    assert server.depths[-1] == 1
    server.run(40, 2)
    assert max(server.depths[-20:]) <= 2
    for number in range(7):
        server.scheduler.abort(number)
    server.run(6, 2)
    assert server.depths[-1] == 2


def test_without_times_a_step_has_a_pass_for_each_draft_of_a_row():
    server = Server(4, 0.0)
    server.budget.times.set_passes(np.zeros(1), np.zeros(1))
    server.run(60, MOST)
    assert server.depths[-1] == MOST
    plan = StepPlan(4, 64, 64, width=MOST + 2)
    scheduler = Scheduler(
        max_slots=4, max_rows=4, max_tokens=64, max_model_len=99, num_blocks=99, block_size=16, prefix_caching=False
    )
    assert not scheduler.drafts.budget.adaptive
    slot = scheduler.add(0, np.ones(1, np.int32), max_tokens=9, drafts=MOST)
    runs = np.full((1, MOST + 2), END - MOST, np.int32)
    runs[:, 0] = 7
    depths = []
    for _ in range(5):
        assert scheduler.schedule(plan)
        depths.append((plan.depth, plan.num_drafted))
        scheduler.commit(plan, runs.reshape(-1))
    assert slot == 0
    assert depths[1:3] == [(MOST, 1)] * 2


def test_fewer_rows_end_a_rest():
    server = Server(8, 0.1)
    server.run(30, 0)
    for number in range(7):
        server.scheduler.abort(number)
    server.run(6, 0)
    assert 1 in server.numbers[30:]


def test_without_times_every_draft_is_verified_up_to_the_limit_of_the_batch():
    scheduler = Server(4, 0.1).scheduler
    budget = Budget(4, 4)
    assert not budget.adaptive
    budget.set_most([(1, 2, 3), (4, 9, 0)])
    scheduler.drafts.budget.set_most([(3, 4, 1)])
    server = Server(4, 0.0)
    server.budget.set_most([(3, 4, 1)])
    server.run(30, 1)
    assert server.numbers[-1] == 4


def test_estimates_begin_with_those_of_all_requests():
    server = Server(4, 0.0)
    assert server.budget.estimates.values(0, MOST) == [ONE * Acceptance.FIRST_RIGHT // Acceptance.FIRST_TRIED] * MOST
    server.run(60, 1)
    server.scheduler.abort(0)
    server.run(3, 1)
    slot = server.scheduler.add(9, np.ones(1, np.int32), max_tokens=9, drafts=MOST)
    first, second, *_ = server.budget.estimates.values(slot, MOST)
    assert first > 0.95 * ONE
    assert second < 0.1 * ONE


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (([], [1.0], [0.0]), "plain: at least one time"),
        (([1.0], [0.0], [0.0]), "mixed: at least one time in seconds is needed, above 0"),
        (([1.0], [2.0, 1.0], [0.0]), "mixed: 1 s for 1 is less than for 0"),
        (([1.0], [1.0], [0.0, -1.0]), "choice: -1 s for 1"),
    ],
)
def test_wrong_times_are_refused(times, words):
    with pytest.raises(ValueError, match=words):
        Budget(1, 1).set_times(*(np.array(values, np.float64) for values in times))


def test_wrong_limits_are_refused():
    for wrong in ((1, 2, RunEnd.VERIFIED), (0, 2, 1), (3, 2, 1)):
        with pytest.raises(ValueError, match="1 row or more"):
            Budget(1, 1).set_most([wrong])
    with pytest.raises(ValueError, match="slot 1"):
        Budget(1, 1).estimates.values(1, 1)
    with pytest.raises(ValueError, match="there is room"):
        Budget(1, 1).sized([[1], [1]], 1, 1, 1, True)
    with pytest.raises(ValueError, match="there is room"):
        Budget(1, 1).sized([[1] * 129], 1, 1, 1, True)


def test_long_contexts_let_more_drafts_pay():
    """The time that a step reads is spent anyway, so further tokens cost less of the whole."""
    budget, times = Budget(8, 8), 0.004 + 0.001 * np.arange(33)
    budget.set_times(times, times, np.zeros(1))
    budget.times.set_reading(1e-6)
    found = [budget.sized([[ONE // 4]] * 8, 8, 8, 8, True, contexts)[0] for contexts in (0, 20_000, 40_000)]
    assert found == [0, 0, 8]
    with pytest.raises(ValueError, match="reading=-1"):
        budget.times.set_reading(-1.0)
