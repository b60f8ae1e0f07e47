"""SteadyLoop against the plain order in Python: the same steps, tokens and endings, whoever runs which step.

The two orders, and the script of arrivals and aborts that both run, are tests.fast.oracles.turns'.
"""

import os
import sys
import threading
import time

import pytest

from _fast.ring import OutputRing
from _fast.steady import (
    REASON_FREED,
    REASON_INBOX,
    REASON_INVALID,
    REASON_PYTHON,
    REASON_RING,
    SPECIAL_ALWAYS,
    SPECIAL_PROMPT,
    SteadyLoop,
)
from tests.fast.oracles.runtime import COPY, GRAPH, QUERY, RECORD, SYNC, Rig, seed_words
from tests.fast.oracles.turns import ERROR, both, script_of, steady_case


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("python", [0.0, 0.4])
def test_the_same_news_in_the_same_order_whoever_runs_a_step(seed, python):
    expected, told, mixed = both(script_of(seed), eager=seed & 1, python=python, seed=seed)
    assert told == expected
    assert mixed.steady.num_steps > 30
    assert min(mixed.reasons[reason] for reason in (REASON_INBOX, REASON_PYTHON, REASON_FREED)) > 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("entries", [1, 3])
def test_a_ring_that_is_full_loses_and_reorders_nothing(seed, entries):
    script = [(5 * step, *rest) for step, *rest in script_of(seed, 40)]  # many steps between two looks at the ring
    expected, told, mixed = both(script, entries=entries, seed=seed)
    assert told == expected
    assert mixed.reasons[REASON_RING] > 10


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_that_preempts_makes_no_difference(seed):
    expected, told, mixed = both(script_of(seed, flags=(0,)), num_blocks=34, vocab=500, python=0.1, seed=seed)
    assert told == expected
    assert mixed.scheduler.num_preemptions > 0


@pytest.mark.parametrize("faulty", [3, 40, 41])
def test_a_row_without_a_token_ends_alone_and_python_settles_it(faulty):
    expected, told, mixed = both(script_of(7, flags=(0,)), faulty=faulty, python=0.0)
    assert told == expected
    assert mixed.reasons[REASON_INVALID] == 1
    assert sum(finish == ERROR for news in told for finish in news[3]) == 1


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
    assert calls.count(COPY) == 1, "the device is told once whose turn it is"
    assert 1e-6 < dict(mixed.steady.learned())[2] < 0.1, "found done, yet they have a period"
    assert mixed.steady.seconds[2] < mixed.steady.periods[2], "and the next one is expected sooner"
    mixed.close()


def test_a_step_tells_what_it_did_and_how_long_its_parts_took():
    mixed = steady_case(most=20, prompts=(5, 9))
    mixed.rig.lib.set_step_ns(2_000_000)
    assert mixed.steady.run(-1) == REASON_FREED
    told = []
    while (entry := mixed.ring.pop()) is not None:
        told.append(entry)
    assert mixed.steady.numbers == told[-1][0]
    numbers, ids, tokens, finishes, firsts = told[0]
    assert numbers[:10] == (0, 2, 14, 2, 2, 0, 4, 0, 14, 0)  # equal prompts share a block
    assert (ids, len(tokens), finishes, firsts) == ([0, 1], 2, [0, 0], {0: 0, 1: 0})
    devices = []
    for numbers, *_, firsts in told[1:]:
        assert not firsts
        schedule, launch, wait, commit, device, gap = numbers[10:]
        devices.append(device)
        assert all(0 < seconds < 0.1 for seconds in (schedule, commit, device))
        assert all(0 <= seconds < 0.1 for seconds in (launch, wait))  # behind the last there is nothing to launch
        assert gap == 0.0
    assert sorted(devices)[len(devices) // 2] > 0.001  # a thread held up finds one step late and the next one short
    mixed.close()


def test_the_gaps_between_steps_are_told_with_those_behind_them():
    mixed = steady_case(most=40)
    mixed.rig.lib.set_step_ns(500_000)
    mixed.rig.launcher.measure_gaps(8)
    assert mixed.steady.run(-1) == REASON_FREED
    told = [mixed.ring.pop()[0] for _ in range(40)]
    assert [numbers[0] for numbers in told if numbers[15]] == [8, 16, 24, 32]
    assert all(0 < numbers[15] < 0.1 for numbers in told if numbers[15])
    mixed.close()


def test_times_of_a_step_that_python_settles_are_there():
    mixed = steady_case(most=50)
    mixed.rig.lib.set_step_ns(1_000_000)
    mixed.rig.lib.set_faulty_step(20)
    assert mixed.steady.run(-1) == REASON_INVALID
    schedule, launch, wait, _, device, _ = mixed.steady.numbers[10:]
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
    mixed.rig.set_graphs(rows, 64, whole=True)  # for 70 tokens there is none
    parts = mixed.rig.plans, mixed.rig.params, mixed.rig.launcher, mixed.ring, mixed.special, mixed.wake
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
    assert 0.02 < mixed.steady.seconds[1] < 0.1
    assert 0.02 < dict(mixed.steady.learned())[1] < 0.1
    os.eventfd_read(mixed.wake)
    before, begun = mixed.scheduler.next_step, time.perf_counter()
    until = mixed.steady.plan_until(mixed.steady.in_flight)
    assert 0.01 < until - begun < 0.1
    threading.Timer(0.005, os.eventfd_write, (mixed.wake, 1)).start()
    assert mixed.steady.run(mixed.steady.in_flight) == REASON_INBOX
    assert time.perf_counter() < until
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

    begun = steady.margin
    run(100)
    assert steady.margin != begun
    assert 0.00015 <= steady.margin <= 0.0015, "half of a step ends it"
    for _ in range(5):  # steps that end long before they should leave no time at all
        before, steady.seconds[1] = steady.margin, 0.02
        run(3)
        assert steady.margin > before
    mixed.close()


def test_a_step_that_was_looked_at_late_does_not_delay_those_behind_it():
    mixed = steady_case(most=400)
    mixed.rig.lib.set_step_ns(1_000_000)
    mixed.launch(mixed.plan())
    time.sleep(0.1)
    mixed.rig.lib.set_wake(mixed.wake, 20)
    begun = time.perf_counter()
    assert mixed.steady.run(0) == REASON_INBOX
    assert time.perf_counter() - begun < 0.5
    os.eventfd_read(mixed.wake)
    mixed.steady.seconds[1] = 0.05  # and a wrong number is soon forgotten: 50 + 25 + 12 + ... ms
    mixed.rig.lib.set_wake(mixed.wake, 20)
    begun = time.perf_counter()
    assert mixed.steady.run(mixed.steady.in_flight) == REASON_INBOX
    assert time.perf_counter() - begun < 0.5
    mixed.close()


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
    thread.join(10)
    assert made > 20  # it has time for a thousand; a busy machine may share out less
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
    parts = [mixed.scheduler, rig.plans, rig.params, rig.launcher, mixed.ring, mixed.special, mixed.wake]
    for place, wrong, words in (
        (1, rig.plans[:2], "2 plans, 3 records"),
        (1, [rig.plans[1], rig.plans[0], rig.plans[2]], "does not lie in record 0"),
        (4, OutputRing(2), "room for 6 rows"),
        (5, mixed.special[:3], "each of 8 slots"),
    ):
        with pytest.raises(ValueError, match=words):
            SteadyLoop(*parts[:place], wrong, *parts[place + 1 :])
    mixed.close()
