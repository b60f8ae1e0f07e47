"""SteadyLoop against the same steps run in plain Python, and against each request's expected answer.

Steps, tokens and endings do not depend on whether SteadyLoop or Python runs a step. The stand-in runtime
(oracles/runtime.c) has a cache of identities, in which every row of every step must find its own prefix. The runtime
draws tokens from a request's number alone.

Both engines run one script of arrivals and aborts; each event has the number of the step before which it happens. The
stand-in runtime wakes the inbox when it launches the step before, so that the loop returns exactly there.
"""

import contextlib
import os
import sys
import threading
import time

import numpy as np
import pytest

from _fast.layout import GraphKind
from _fast.ring import OutputRing, logprobs_of_words
from _fast.scheduler import Scheduler
from _fast.steady import (
    REASON_FREED,
    REASON_IDLE,
    REASON_INBOX,
    REASON_INVALID,
    REASON_PREEMPTED,
    REASON_PYTHON,
    REASON_RING,
    REASON_WOKEN,
    SPECIAL_ALWAYS,
    SPECIAL_PROMPT,
    SPECIAL_VARIANT_SHIFT,
    SPECIAL_WATCHED,
    SteadyLoop,
)
from tests.fast.oracles.runtime import COPY, GRAPH, QUERY, RECORD, SYNC, Rig, seed_words

ROWS, TOKENS, SLOTS, EOS = 6, 64, 12, 3
STOP, LENGTH, ERROR = 1, 3, 5
PROMPT = 7, 11  # token p of each prompt is 7 p % 11
CONTEXT = 1024  # positions in the stand-in's cache


class Engine:
    """The order of engine/run/loop with two steps in flight. `news` has (step, ids, tokens, finishes) of each step."""

    def __init__(self, script, vocab=40, width=1, times=None, **settings):
        """times: of steps, for the budget of drafts; the drafter may rest."""
        defaults = {"max_slots": SLOTS, "max_rows": ROWS, "max_tokens": TOKENS, "max_model_len": 128, "block_size": 4}
        self.scheduler = Scheduler(**{**defaults, "num_blocks": 60, **settings})
        rows = self.scheduler.max_rows
        sizes = rows, self.scheduler.max_tokens, 1 << 12, self.scheduler.max_slots
        self.rig = Rig(*sizes, width=width, run_width=self.scheduler.run_width, rests=times is not None)
        if times is not None:
            self.scheduler.drafts.budget.set_times(*times)
            self.scheduler.drafts.budget.let_rest(1)
        self.width = width
        self.rig.lib.set_vocab(vocab)
        if self.scheduler.max_model_len <= CONTEXT:
            self.rig.lib.set_cache(defaults["block_size"], *PROMPT)
        self.refused = set()
        self.special = np.zeros(self.scheduler.max_slots, np.uint8)
        self.script = list(script)  # (step, what, number, details), ordered by step
        self.live = {}  # number -> slot
        self.news = []
        self.previous = None  # index of the plan in flight

    # Events of the script.

    def due(self, idle=False):
        """Runs the script's events for the next step; if no request runs, the next event at any step."""
        while self.script and (self.script[0][0] <= self.scheduler.next_step or idle):
            idle = False
            _, what, number, details = self.script.pop(0)
            if what == "add":
                length, most, flags = details
                prompt = (np.arange(length) * PROMPT[0] % PROMPT[1]).astype(np.int32)
                drafts = max(0, self.width - 2)
                slot = self.scheduler.add(number, prompt, max_tokens=most, eos_ids=[EOS], drafts=drafts)
                if slot >= 0:
                    most_len = min(length + most, self.scheduler.max_model_len)
                    self.rig.params.stage(slot, seed_words(slot, length, number, most_len))
                    self.special[slot] = flags
                    self.live[number] = slot
                else:
                    self.refused.add(number)
            elif number in self.live:
                assert self.scheduler.abort(number)
                del self.live[number]
                self.forget()

    def forget(self):
        for slot in self.scheduler.freed_slots[: self.scheduler.num_freed]:
            self.rig.params.forget(slot)

    # The parts of a step.

    def plan(self):
        index = self.scheduler.next_step % len(self.rig.plans)
        self.rig.launcher.wait_until_read(index)
        return index if self.scheduler.schedule(self.rig.plans[index]) else None

    def launch(self, index):
        plan, launcher = self.rig.plans[index], self.rig.launcher
        self.rig.params.pack(plan)
        launcher.prep(plan, index)
        size = launcher.pick(plan.num_decode_rows != plan.num_rows, plan.num_tokens)
        if size:
            launcher.replay(plan.num_decode_rows != plan.num_rows, size)
        if plan.num_sampled:
            size = launcher.pick(GraphKind.SAMPLE, plan.num_lines, plan.variant)
            launcher.replay(GraphKind.SAMPLE, size, plan.variant)
        launcher.finish()

    def settle(self, index, wait=True):
        plan = self.rig.plans[index]
        if wait:
            assert self.rig.launcher.wait(index, 5.0)
        tokens = self.rig.ring[index][: plan.num_rows * self.width]
        sampled = (np.asarray(plan.row_flags)[: plan.num_rows] & 1).astype(bool)
        override = np.where(sampled & (tokens[:: self.width] < 0), ERROR, 0).astype(np.int32)
        self.scheduler.commit(plan, tokens, override)
        self.forget()
        self.emit(self.read(plan))

    def read(self, plan):
        emitted = (plan.step_id, [], [], [])
        for row in range(plan.num_rows):
            number, finish, count = plan.out_request[row], plan.out_finish[row], plan.out_count[row]
            run = [plan.out_token[row * self.width + k] for k in range(count)] or [-1] * bool(finish)
            for token in run:
                for column, value in zip(emitted[1:], (number, token, 0)):
                    column.append(value)
            if run:
                emitted[3][-1] = finish
        return emitted

    def emit(self, emitted):
        self.receive(emitted)

    def receive(self, emitted):
        self.news.append(emitted)
        for number, finish in zip(emitted[1], emitted[3]):
            if finish:
                del self.live[number]

    def turn(self):
        """One turn of the loop in Python. Returns False if there was nothing to do."""
        index = self.plan()
        if index is None and self.previous is None:
            return False
        if index is not None:
            self.launch(index)
        if self.previous is not None:
            self.settle(self.previous)
        self.previous = index
        return True

    def run(self):
        while True:
            self.due()
            if not self.turn():
                if not self.script:
                    break
                self.due(idle=True)
        assert self.rig.fault == 0
        assert not self.live
        assert self.scheduler.ledger()["slots"] == self.scheduler.ledger()["in_flight"] == 0
        return self.news


class Mixed(Engine):
    """The same engine; SteadyLoop runs the turns except for a share that Python runs. News pass through the ring."""

    def __init__(self, script, *, entries=64, python=0.2, seed=0, asked=None, lines=None, **settings):
        super().__init__(script, **settings)
        self.ring = OutputRing(self.scheduler.max_rows, entries, asked, lines, self.width)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watched = np.full((1024, 1), -1, np.int32)  # [slots, 1]: the token that brings a step back to Python
        self.steady = SteadyLoop(
            self.scheduler,
            self.rig.plans,
            self.rig.params,
            self.rig.launcher,
            self.ring,
            self.special,
            self.watched,
            self.wake,
        )
        self.rng = np.random.default_rng(seed)
        self.python = python
        self.reasons = dict.fromkeys((*range(1, 7), REASON_PREEMPTED), 0)

    def emit(self, emitted):
        self.ring.put(emitted)

    def drain(self):
        self.ring.acknowledge()
        while (emitted := self.ring.pop()) is not None:
            self.receive((emitted[0].step_id, *emitted[1:4]) if isinstance(emitted[0], tuple) else emitted)

    def due(self, idle=False):
        self.drain()
        super().due(idle)
        with contextlib.suppress(BlockingIOError):  # the loop may have returned for another reason just then
            os.eventfd_read(self.wake)

    def turn(self):
        steady = self.steady
        plain = self.previous is None or steady.is_plain(self.rig.plans[self.previous])
        if not plain or self.rng.random() < self.python:
            return super().turn()
        self.rig.lib.set_wake(self.wake, self.script[0][0] - self.scheduler.next_step if self.script else 0)
        reason = steady.run(-1 if self.previous is None else self.previous)
        self.rig.lib.set_wake(self.wake, 0)
        self.reasons[reason] += 1
        return self.follow(reason)

    def follow(self, reason):
        steady = self.steady
        assert (steady.uncommitted >= 0) == (reason == REASON_INVALID)
        assert (steady.unpublished >= 0) == (reason == REASON_RING)
        assert (steady.planned >= 0) == (reason == REASON_PYTHON)
        assert not steady.freed or reason in (REASON_FREED, REASON_RING)
        if reason == REASON_INBOX:
            assert self.scheduler.next_step == self.script[0][0]
        if steady.uncommitted >= 0:
            self.settle(steady.uncommitted, wait=False)
        if steady.unpublished >= 0:
            plan = self.rig.plans[steady.unpublished]
            assert steady.numbers[:3] == (plan.step_id, plan.num_rows, plan.num_tokens)
            self.emit(self.read(plan))
        if steady.freed:
            self.forget()
        self.previous = steady.in_flight if steady.in_flight >= 0 else None
        if steady.planned >= 0:
            assert not steady.is_plain(self.rig.plans[steady.planned])
            self.launch(steady.planned)
            if self.previous is not None:
                self.settle(self.previous)
            self.previous = steady.planned
        return reason != REASON_IDLE

    def close(self):
        self.drain()
        self.ring.close()
        os.close(self.wake)


def script_of(seed, length=120, flags=(0, 0, 0, 0, 1, 2)):
    """Arrivals and aborts at random steps."""
    rng = np.random.default_rng(seed)
    step, number, script = 0, 0, []
    for _ in range(length):
        step += int(rng.integers(0, 5))
        if number and rng.random() < 0.15:
            script.append((step, "abort", int(rng.integers(0, number)), None))
        else:
            details = int(rng.integers(1, 90)), int(rng.integers(1, 30)), int(rng.choice(flags))
            script.append((step, "add", number, details))
            number += 1
    return script


def check_endings(engine, script):
    """Compares each request's news with the tokens drawn for that request alone, for any steps and rows."""
    added = {number: details for _, what, number, details in script if what == "add"}
    aborted = {number for _, what, number, _ in script if what == "abort"}
    tokens, why = {number: [] for number in added}, dict.fromkeys(added, 0)
    for _, numbers, drawn, finishes in engine.news:
        for number, token, finish in zip(numbers, drawn, finishes):
            assert not why[number], "news behind the end"
            tokens[number] += [token] if token >= 0 else []
            why[number] = finish
    for number, (length, most, _) in added.items():
        room = min(most, engine.scheduler.max_model_len - length)
        wanted = [engine.rig.draw(number, place) for place in range(room)]
        if EOS in wanted:
            wanted = wanted[: wanted.index(EOS) + 1]
        assert tokens[number] == wanted[: len(tokens[number])]
        if why[number] in (STOP, LENGTH):
            assert tokens[number] == wanted
            assert why[number] == (STOP if wanted[-1] == EOS else LENGTH)
        else:
            assert why[number] == ERROR or number in aborted | engine.refused
            assert number not in engine.refused or not tokens[number]


def both(script, faulty=-1, eager=0, **options):
    """The news of a plain engine, the news of a mixed engine, and the mixed engine."""
    names = ("num_blocks", "vocab", "width", "times", "max_tokens", "prefix_caching", "groups")
    names += ("state_blocks", "tail_blocks")
    settings = {name: options.pop(name) for name in names if name in options}
    plain = Engine(script, **settings)
    plain.rig.lib.set_faulty_step(faulty)
    expected = plain.run()
    mixed = Mixed(script, **settings, **options)
    mixed.rig.lib.set_eager(eager)
    mixed.rig.lib.set_faulty_step(faulty)
    mixed.run()
    mixed.close()
    check_endings(mixed, script)
    return [emitted for emitted in expected if emitted[1]], [emitted for emitted in mixed.news if emitted[1]], mixed


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("python", [0.0, 0.4])
def test_the_same_news_in_the_same_order_whoever_runs_a_step(seed, python):
    expected, emitted, mixed = both(script_of(seed), eager=seed & 1, python=python, seed=seed)
    assert emitted == expected
    assert mixed.steady.num_steps > 30
    assert min(mixed.reasons[reason] for reason in (REASON_INBOX, REASON_PYTHON, REASON_FREED)) > 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("entries", [1, 64])
def test_rows_bring_home_runs_of_tokens(seed, entries):
    """Rows return one to three tokens per step, by their right drafts; all tests here check the news of their ends."""
    script = script_of(seed, flags=(0,))
    expected, emitted, _ = both(script, width=4, entries=entries, seed=seed)
    assert emitted == expected
    assert any(len(news[1]) > len(set(news[1])) for news in emitted), "a row is named once for each of its tokens"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", [0.02, 0.2, 1.5])
def test_a_budget_of_drafts_needs_no_python(seed, cost):
    """Some drafts are verified, or none: then the drafter rests, and is tried from time to time."""
    script = script_of(seed, flags=(0,), length=60)
    seconds = 1 + cost * np.arange(TOKENS + 1)
    times = seconds, seconds, np.zeros(1)
    expected, emitted, mixed = both(script, width=5, times=times, python=0.0, seed=seed)
    assert emitted == expected
    assert mixed.reasons[REASON_PYTHON] == 0
    drafts = mixed.scheduler.drafts
    assert drafts.num_draft_tokens > 0
    assert drafts.budget.rest.num_probes > 0 or cost < 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("num_blocks", [60, 200])
def test_rows_with_states_need_no_python(seed, width, num_blocks):
    """States are named, reused and dropped, and rows start over."""
    script = script_of(seed, flags=(0,))
    states = {"groups": ((0, 0), (2, 4)), "state_blocks": 3, "tail_blocks": 2, "num_blocks": num_blocks}
    expected, emitted, mixed = both(script, python=0.0, seed=seed, width=width, **states)
    assert emitted == expected
    assert mixed.reasons[REASON_PYTHON] == 0
    assert mixed.steady.num_steps > 30
    counts = mixed.scheduler.state_counts
    assert min(counts["stored"], counts["hit"]) > 10
    assert mixed.scheduler.ledger()["runs_used"] == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("entries", [1, 3])
def test_a_ring_that_is_full_loses_and_reorders_nothing(seed, entries):
    script = [(5 * step, *rest) for step, *rest in script_of(seed, 40)]  # many steps between two reads of the ring
    expected, emitted, mixed = both(script, entries=entries, seed=seed)
    assert emitted == expected
    assert mixed.reasons[REASON_RING] > 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1, 4])
def test_a_pool_that_preempts_makes_no_difference(seed, width):
    script = script_of(seed, flags=(0,))
    expected, emitted, mixed = both(script, num_blocks=34, vocab=500, width=width, python=0.1, seed=seed)
    assert emitted == expected
    assert mixed.scheduler.num_preemptions > 0
    assert mixed.reasons[REASON_PREEMPTED] > 0


@pytest.mark.parametrize("faulty", [3, 40, 41])
def test_a_row_without_a_token_ends_alone_and_python_settles_it(faulty):
    expected, emitted, mixed = both(script_of(7, flags=(0,)), faulty=faulty, python=0.0)
    assert emitted == expected
    assert mixed.reasons[REASON_INVALID] == 1
    assert sum(finish == ERROR for news in emitted for finish in news[3]) == 1


def steady_case(most=100, prompts=(5,), entries=4096, flags=0, vocab=1 << 30, **settings):
    settings = {"max_model_len": 1 << 14, "num_blocks": 1 << 13, "max_slots": 8, **settings}
    script = [(0, "add", number, (length, most, flags)) for number, length in enumerate(prompts)]
    mixed = Mixed(script, entries=entries, python=0.0, vocab=vocab, **settings)
    mixed.due()
    return mixed


@pytest.mark.parametrize("needed", [0, 3])
def test_rows_say_which_variant_of_the_graphs_runs_their_steps(needed):
    mixed = steady_case(most=20, prompts=(5, 9), flags=needed << SPECIAL_VARIANT_SHIFT)
    mixed.rig.launcher.set_graph(GraphKind.STEP, 3, 2, 60002)
    mixed.rig.take_calls()
    assert mixed.steady.run(-1) == REASON_FREED
    steps = [which for what, which in mixed.rig.take_calls() if what == GRAPH and which > 50000]
    assert set(steps) == {60002 if needed else 50002}
    mixed.close()


def test_a_steady_decode_step_is_one_graph_and_one_wait():
    mixed = steady_case(most=50, prompts=(5, 9))
    mixed.rig.take_calls()
    assert mixed.steady.run(-1) == REASON_FREED
    log = mixed.rig.take_calls()
    calls = [what for what, _ in log]
    steps = 50
    assert mixed.steady.num_steps == steps
    launched = calls.count(RECORD)
    assert steps <= launched <= steps + 1
    assert calls.count(GRAPH) == launched + 2, "the step of the prompts is launched in its parts"
    assert sum(what == GRAPH and which > 50000 for what, which in log) == launched - 1
    assert calls.count(SYNC) == steps
    assert calls.count(QUERY) == 0, "nobody polls"
    assert calls.count(COPY) == 1, "whose turn it is goes to the device once"
    assert 1e-6 < dict(mixed.steady.learned())[2] < 0.1, "found done, yet they have a period"
    assert mixed.steady.clock.seconds[2] < mixed.steady.clock.periods[2], "and the next one is expected sooner"
    mixed.close()


def test_a_step_reports_what_it_did_and_how_long_its_parts_took():
    mixed = steady_case(most=20, prompts=(5, 9))
    mixed.rig.lib.set_step_ns(2_000_000)
    assert mixed.steady.run(-1) == REASON_FREED
    emitted = []
    while (entry := mixed.ring.pop()) is not None:
        emitted.append(entry)
    assert mixed.steady.numbers == emitted[-1][0]
    numbers, ids, tokens, finishes, *_ = emitted[0]
    assert numbers[:10] == (0, 2, 14, 2, 2, 0, 4, 0, 14, 0)  # equal prompts share a block
    assert (ids, len(tokens), finishes) == ([0, 1], 2, [0, 0])
    devices = []
    for numbers, _, _, _, logprobs, *_ in emitted[1:]:
        assert not logprobs
        schedule, launch, wait, commit, device, gap = numbers[10:16]
        devices.append(device)
        assert all(0 < seconds < 1 for seconds in (schedule, commit, device))
        assert all(0 <= seconds < 1 for seconds in (launch, wait))  # after the last step there is nothing to launch
        assert gap == 0.0
    # The median: a delayed thread measures one step too long and the next one too short.
    assert sorted(devices)[len(devices) // 2] > 0.001
    mixed.close()


def test_log_probabilities_go_out_with_the_tokens_of_the_slots_that_asked():
    lines = np.random.default_rng(3).integers(0, 2**30, (8, 8, 3, 3 + 2 * 4), np.int32)
    asked = np.array([0, 3, 1, 0, 0, 0, 0, 0], np.uint8)  # 1 + number of top log-probabilities
    mixed = steady_case(most=20, prompts=(5, 9, 7), asked=asked, lines=lines)
    slots = dict(mixed.live)
    assert mixed.steady.run(-1) == REASON_FREED
    seen = 0
    while (entry := mixed.ring.pop()) is not None:
        numbers, ids, _, _, emitted, *_ = entry
        wanted = {}
        for row, request in enumerate(ids):
            if asked[slots[request]]:
                words = lines[numbers.step_id % len(mixed.rig.plans), row, 0]
                wanted[row] = logprobs_of_words(words, asked[slots[request]] - 1)
                assert wanted[row][0] == words[0]
                assert wanted[row][3] == words[3 : 3 + len(wanted[row][4])].tolist()
        assert emitted == wanted
        assert {len(each[3]) for each in emitted.values()} == {0, 2}
        seen += 1
    assert seen == 20
    mixed.close()
    with pytest.raises(ValueError, match="a line for 9 rows"):
        OutputRing(9, 1, asked, lines)
    with pytest.raises(ValueError, match="need `asked`"):
        OutputRing(8, 1, None, lines)


def test_each_token_of_a_run_has_its_log_probabilities():
    lines = np.random.default_rng(3).integers(0, 2**30, (8, 8, 3, 3 + 2 * 4), np.int32)
    mixed = steady_case(most=40, prompts=(5,), asked=np.full(8, 2, np.uint8), lines=lines, width=4)
    assert mixed.steady.run(-1) == REASON_FREED
    lengths = set()
    while (entry := mixed.ring.pop()) is not None:
        numbers, ids, _, _, emitted, *_ = entry
        row = lines[numbers.step_id % len(mixed.rig.plans), 0]
        assert emitted == {place: logprobs_of_words(row[place], 1) for place in range(len(ids))}
        lengths.add(len(ids))
    assert lengths - {0} == {1, 2, 3}, "behind the answer's end a step has no news"
    mixed.close()


def test_a_watched_token_anywhere_in_a_run_brings_its_step_back_to_python():
    plain = steady_case(most=60, prompts=(5,), width=4)
    assert plain.steady.run(-1) == REASON_FREED
    runs = iter(plain.ring.pop, None)
    run = next(tokens for _, _, tokens, *_ in runs if len(tokens) == 3)
    plain.close()
    mixed = steady_case(most=60, prompts=(5,), flags=SPECIAL_WATCHED, width=4)
    mixed.watched[:, 0] = run[2]
    assert mixed.steady.run(-1) == REASON_WOKEN
    tokens = mixed.rig.ring[mixed.steady.uncommitted][:4]
    assert run[2] in tokens.tolist()
    mixed.settle(mixed.steady.uncommitted, wait=False)
    mixed.close()


@pytest.mark.parametrize("run", [(-1, 4, 4), (4, -1, 4), (4, 4, -2)])
def test_a_run_with_anything_but_tokens_and_an_end_is_pythons(run):
    mixed = steady_case(most=60, prompts=(5,), width=3)
    mixed.rig.lib.set_faulty_step(5)
    mixed.rig.lib.set_faulty_run(*run)
    assert mixed.steady.run(-1) == REASON_INVALID
    assert mixed.rig.plans[mixed.steady.uncommitted].step_id == 5
    mixed.settle(mixed.steady.uncommitted, wait=False)
    mixed.close()


def test_a_gap_between_steps_is_reported_with_the_step_behind_it():
    mixed = steady_case(most=40)
    mixed.rig.lib.set_step_ns(500_000)
    mixed.rig.launcher.measure_gaps(8)
    assert mixed.steady.run(-1) == REASON_FREED
    emitted = [mixed.ring.pop()[0] for _ in range(40)]
    assert [numbers.step_id for numbers in emitted if numbers.gap_s] == [8, 16, 24, 32]
    assert all(0 < numbers.gap_s < 0.1 for numbers in emitted if numbers.gap_s)
    mixed.close()


def test_times_of_a_step_that_python_settles_are_there():
    mixed = steady_case(most=50)
    mixed.rig.lib.set_step_ns(1_000_000)
    mixed.rig.lib.set_faulty_step(20)
    assert mixed.steady.run(-1) == REASON_INVALID
    schedule, launch, wait, _, device, _ = mixed.steady.numbers[10:16]
    assert min(schedule, launch, wait) > 0
    assert 0.0005 < device < 0.1
    launched = mixed.rig.launcher.launched_at_of(mixed.steady.in_flight)
    assert launched < mixed.rig.launcher.ended_at < time.perf_counter()
    mixed.close()


def test_the_special_byte_decides_who_runs_a_step():
    for flags, python_steps in ((SPECIAL_PROMPT, 2), (SPECIAL_ALWAYS, 8)):
        mixed = steady_case(most=7, prompts=(100,), flags=flags)  # chunks of 64 and 36, then six single tokens
        mixed.run()
        assert mixed.scheduler.next_step == 8
        assert 8 - mixed.steady.num_steps - python_steps in (0, 1), (
            "one in flight behind a special step may be Python's"
        )
        mixed.close()


def test_a_step_without_a_graph_is_left_to_python():
    mixed = steady_case(prompts=(70,), max_tokens=80)
    rows = mixed.scheduler.max_rows
    mixed.rig = Rig(rows, 80, 1 << 12, 8, graphs=False)
    mixed.rig.set_graphs(rows, 64, whole=True)  # 70 tokens exceed the largest graph
    parts = mixed.rig.plans, mixed.rig.params, mixed.rig.launcher, mixed.ring, mixed.special, mixed.watched, mixed.wake
    mixed.rig.params.stage(0, seed_words(0, 70, 0))
    mixed.steady = SteadyLoop(mixed.scheduler, *parts)
    assert mixed.steady.run(-1) == REASON_PYTHON
    assert mixed.rig.plans[mixed.steady.planned].num_tokens == 70
    mixed.follow(REASON_PYTHON)
    assert mixed.steady.run(mixed.previous) == REASON_FREED
    mixed.close()


def test_the_next_step_is_planned_late_and_an_arrival_in_time_joins_it():
    mixed = steady_case(most=400)
    mixed.rig.lib.set_step_ns(50_000_000)
    mixed.rig.lib.set_wake(mixed.wake, 6)
    assert mixed.steady.run(-1) == REASON_INBOX
    for _ in range(10):
        if 0.02 < mixed.steady.clock.seconds[1] < 0.1:
            break
        os.eventfd_read(mixed.wake)  # the machine was stalled and found steps finished: run six more
        mixed.rig.lib.set_wake(mixed.wake, 6)
        assert mixed.steady.run(mixed.steady.in_flight) == REASON_INBOX
    assert 0.02 < mixed.steady.clock.seconds[1] < 0.1
    assert 0.02 < dict(mixed.steady.learned())[1] < 0.1
    for _ in range(20):
        os.eventfd_read(mixed.wake)
        before, begun = mixed.scheduler.next_step, time.perf_counter()
        until = mixed.steady.plan_until(mixed.steady.in_flight)
        assert until - begun < 0.1
        timer = threading.Timer(0.005, os.eventfd_write, (mixed.wake, 1))
        timer.start()
        assert mixed.steady.run(mixed.steady.in_flight) == REASON_INBOX
        in_time = time.perf_counter() < until
        timer.join()
        if in_time:  # otherwise the timer or this thread was delayed
            break
    assert in_time
    assert mixed.scheduler.next_step == before, "nothing was planned meanwhile"
    mixed.close()


def test_planning_is_as_late_as_the_delays_that_were_seen_allow():
    mixed = steady_case(most=3000)
    mixed.rig.lib.set_step_ns(3_000_000)
    steady = mixed.steady

    def run(steps):
        mixed.rig.lib.set_wake(mixed.wake, steps)
        assert steady.run(steady.in_flight) == REASON_INBOX
        os.eventfd_read(mixed.wake)

    begun = steady.clock.margin
    run(100)
    assert steady.clock.margin != begun
    assert 0.00015 <= steady.clock.margin <= 0.0015, "half of a step ends it"
    for _ in range(5):  # steps that end long before their expected end increase the margin
        before, steady.clock.seconds[1] = steady.clock.margin, 0.02
        run(3)
        assert steady.clock.margin > before or steady.clock.margin == 0.002, "it grows up to that"
    mixed.close()


def test_a_step_that_was_looked_at_late_does_not_delay_those_behind_it():
    mixed = steady_case(most=1000)
    mixed.rig.lib.set_step_ns(1_000_000)
    mixed.launch(mixed.plan())
    time.sleep(0.1)

    def seconds(in_flight):
        mixed.rig.lib.set_wake(mixed.wake, 20)
        begun = time.perf_counter()
        assert mixed.steady.run(in_flight) == REASON_INBOX
        taken = time.perf_counter() - begun
        os.eventfd_read(mixed.wake)
        return taken

    assert seconds(0) < 1.5, "20 steps behind one of 100 ms, that each wait as long, take 2 s"
    for _ in range(5):  # on a busy machine other work takes longer than the steps
        mixed.steady.clock.seconds[1] = 0.05  # a wrong estimate is corrected soon: 50 + 25 + 12 + ... ms
        taken = seconds(mixed.steady.in_flight)
        if taken < 0.5:
            break
    assert taken < 0.5
    mixed.close()


@pytest.mark.alone
def test_it_runs_while_another_thread_never_lets_go_of_the_lock():
    mixed = steady_case(most=3000)
    mixed.rig.lib.set_step_ns(200_000)
    steady, interval = mixed.steady, sys.getswitchinterval()
    thread = threading.Thread(target=steady.run, args=(-1,))
    thread.start()
    while steady.num_steps < 10:
        time.sleep(0.001)
    sys.setswitchinterval(30.0)
    try:
        before, until = steady.num_steps, time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass
        made, beat = steady.num_steps - before, time.monotonic() - steady.last_beat
    finally:
        sys.setswitchinterval(interval)
    os.eventfd_write(mixed.wake, 1)
    thread.join(60)
    assert made > 20  # a thousand steps fit; a busy machine may leave less time
    assert beat < 0.1
    mixed.close()


def test_a_call_that_fails_is_raised_by_name():
    for what, name in ((GRAPH, "GraphLaunch"), (SYNC, "EventSynchronize")):
        mixed = steady_case()
        mixed.rig.lib.set_failure(what, 700, 5)
        with pytest.raises(RuntimeError, match=f"{name} returned 700"):
            mixed.steady.run(-1)
        mixed.close()


def test_a_mistake_is_refused_in_words():
    mixed = steady_case()
    steady, rig = mixed.steady, mixed.rig
    with pytest.raises(ValueError, match="plan 3"):
        steady.run(3)
    with pytest.raises(ValueError, match="0 steps are in flight"):
        steady.run(0)
    mixed.launch(mixed.plan())
    for wrong, words in ((-1, "1 steps are in flight"), (1, "does not hold the step in flight")):
        with pytest.raises(ValueError, match=words):
            steady.run(wrong)
    parts = [mixed.scheduler, rig.plans, rig.params, rig.launcher, mixed.ring, mixed.special, mixed.watched, mixed.wake]
    for place, wrong, words in (
        (1, rig.plans[:2], "2 plans, 3 records"),
        (1, [rig.plans[1], rig.plans[0], rig.plans[2]], "does not lie in record 0"),
        (4, OutputRing(2), "room for 6 rows"),
        (5, mixed.special[:3], "each of 8 slots"),
    ):
        with pytest.raises(ValueError, match=words):
            SteadyLoop(*parts[:place], wrong, *parts[place + 1 :])
    mixed.close()
