"""StepClock: expected durations of steps, and the margin before the end of a step."""

import random

import pytest

from _fast.clock import StepClock, believe

LEAST = 0.0003
WAITED, NOT_WAITED = 0.001, 0.0


def test_a_shorter_step_is_believed_at_once_and_a_longer_one_slowly():
    clock = StepClock(4, LEAST)
    assert clock.expected(1) == 0
    for took, expected in ((0.010, 0.010), (0.006, 0.006), (0.026, 0.007)):
        assert clock.learn(1, took, True, WAITED)
        assert clock.expected(1) == pytest.approx(expected)
    assert clock.learn(1, 0.001, False, WAITED), "it began before that time: longer than it seems"
    assert clock.expected(1) == pytest.approx(0.007)
    assert clock.expected(2) == 0


def test_a_step_found_done_halves_what_is_expected_and_one_period_is_not_believed_at_once():
    clock = StepClock(4, LEAST)
    assert not clock.learn(1, 0.010, True, NOT_WAITED)
    assert (clock.expected(1), clock.periods[1]) == (0.0, 0.010), "the next one is planned at once"
    clock.learn(1, 0.010, True, WAITED)
    clock.learn(1, 0.008, True, NOT_WAITED)
    assert clock.expected(1) == 0.004
    assert clock.periods[1] == pytest.approx(0.0099)
    clock.learn(1, 0.008, True, NOT_WAITED)
    assert clock.expected(1) == 0.002


def test_an_unseen_kind_takes_at_least_what_smaller_ones_take():
    clock = StepClock(8, LEAST)
    assert clock.at_least(5) == 0
    clock.learn(2, 0.012, True, WAITED)
    clock.learn(3, 0.010, True, WAITED)
    assert [clock.at_least(kind) for kind in (0, 2, 3, 5)] == [0, 0.012, 0.010, 0.012]


def test_the_margin_grows_where_steps_end_before_the_next_is_launched():
    clock = StepClock(4, LEAST)
    begun = clock.margin
    for waited in (0.00005, 0.00005, WAITED):
        clock.adapt(0.006, waited)
    assert clock.margin == pytest.approx(begun + 197e-6)
    clock.adapt(0.0005, 0.0)
    assert clock.margin == pytest.approx(begun + 197e-6), "half of so short a step decided, not the margin"
    for _ in range(100):
        clock.adapt(0.006, 0.0)
    assert clock.margin == 0.002
    for _ in range(2000):
        clock.adapt(0.006, WAITED)
    assert clock.margin == LEAST


def test_planning_comes_the_margin_before_the_end_and_never_before_half_of_the_step():
    clock = StepClock(4, LEAST)
    assert clock.plan_at(7.0, 0.0) == 0.0
    assert clock.plan_at(7.0, 0.010) == pytest.approx(7.010 - clock.margin)
    assert clock.plan_at(7.0, 0.0004) == pytest.approx(7.0002)


def test_times_that_vary_are_known_within_their_range():
    random_ = random.Random(0)
    clock = StepClock(2, LEAST)
    for _ in range(1000):
        clock.learn(1, random_.uniform(0.005, 0.008), random_.random() < 0.9, WAITED)
        assert 0.005 <= clock.expected(1) <= 0.008
        assert 0.005 <= clock.periods[1] <= 0.008


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="at least one kind"):
        StepClock(0, LEAST)
    with pytest.raises(ValueError, match="margin 1"):
        StepClock(1, 1.0)
    assert believe(0.0, 3.0, False) == 3.0
