"""SteadyLoop while every place is taken: the next step is planned at once, and nobody loses anything by it.

Whoever arrives meanwhile could not have joined that step; whoever leaves gives the place back a step later than before,
and behind the first one that does, planning waits again.
"""

import os
import threading
import time

import numpy as np
import pytest

from _fast.steady import REASON_FREED, REASON_INBOX
from tests.fast.oracles.runtime import GRAPH, SYNC, seed_words
from tests.fast.oracles.turns import EOS, ROWS, Engine, both, script_of, steady_case

CALM = 64  # steps behind an abort in which planning waits (_fast/steady.pyx)
STEP_S = 0.02
SIX = 3  # the bit length of a step's tokens


def taken(rows=ROWS, most=4000, **settings):
    """An engine whose rows decode, long after any abort, and whose steps take STEP_S."""
    mixed = steady_case(most=most, prompts=(5,) * rows, **settings)
    run(mixed, CALM + 6)
    return slowly(mixed)


def slowly(mixed):
    """The same, and its steps take their time from now on."""
    mixed.rig.lib.set_step_ns(int(STEP_S * 1e9))
    run(mixed, 3)
    return mixed


def run(mixed, steps):
    """So many steps more; the seconds that the thread waited for each that was settled."""
    steady = mixed.steady
    mixed.rig.lib.set_wake(mixed.wake, steps)
    assert steady.run(steady.in_flight) == REASON_INBOX
    os.eventfd_read(mixed.wake)
    waits = []
    while (told := mixed.ring.pop()) is not None:
        waits.append(told[0][12])
        assert not any(told[3])
    return waits


def plans_at_once(mixed):
    """Whether the next step is planned before something arrives, in the middle of a step that seems to take long."""
    steady = mixed.steady
    steady.seconds[SIX] = 5.0
    before, begun = mixed.scheduler.next_step, time.perf_counter()
    threading.Timer(STEP_S / 2, os.eventfd_write, (mixed.wake, 1)).start()
    assert steady.run(steady.in_flight) == REASON_INBOX
    assert time.perf_counter() - begun < 1, "what arrives is taken within a step"
    os.eventfd_read(mixed.wake)
    steady.seconds[SIX] = STEP_S
    return mixed.scheduler.next_step > before


@pytest.mark.parametrize("blocks", [60, 34])
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_made_with_all_places_taken_knows_all_that_counts(seed, blocks):
    """Arrivals heard of before or behind it: the same steps, rows and tokens."""

    class Behind(Engine):
        """Hears of what has arrived only when a step is planned, wherever all places are taken."""

        count = 0

        def due(self, idle=False):
            self.later = not idle and self.previous is not None and self.scheduler.num_running == ROWS
            if not self.later:
                super().due(idle)

        def plan(self):
            step = self.scheduler.next_step
            index = super().plan()
            if self.later:
                before = len(self.script)
                self.happen(step)
                self.count += before - len(self.script)
            return index

    script = [item for item in script_of(seed, flags=(0,)) if item[1] == "add"]
    settings = {"num_blocks": blocks, "vocab": 500}
    expected = Engine(script, **settings).run()  # one after the other: there is one stand-in runtime
    behind = Behind(script, **settings)
    assert behind.run() == expected
    assert behind.count > 5
    assert blocks == 60 or behind.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", range(6))
def test_the_same_news_whoever_runs_a_step_while_aborts_are_rare(seed):
    script = script_of(seed, 240, most=60)
    script = [item for number, item in enumerate(script) if item[1] == "add" or number % 8 == 0]
    expected, told, mixed = both(script, seed=seed, eager=seed & 1, vocab=400)
    assert told == expected
    assert mixed.steady.num_steps > CALM


def test_with_all_places_taken_planning_does_not_wait():
    mixed = taken()
    assert np.median(run(mixed, 7)[2:]) > 0.5 * STEP_S, "the thread sleeps once"
    assert 0.2 * STEP_S < mixed.steady.seconds[SIX] < 3 * STEP_S, "and what steps take is still learned"
    assert 0.2 * STEP_S < dict(mixed.steady.learned())[SIX] < 3 * STEP_S
    assert any(plans_at_once(mixed) for _ in range(4)), "a busy machine may let the arrival come first"
    mixed.close()


def test_with_a_place_left_it_waits():
    mixed = taken(ROWS - 1)
    assert not plans_at_once(mixed)
    mixed.close()


def test_where_blocks_are_short_it_waits():
    mixed = taken(most=110, block_size=64, num_blocks=1 + 2 * ROWS + ROWS - 1, prefix_caching=False)
    assert mixed.scheduler.pool.num_free == ROWS - 1
    assert not plans_at_once(mixed)
    assert mixed.scheduler.num_preemptions == 0
    mixed.close()


def test_at_most_two_steps_are_in_flight_and_each_is_one_graph_and_one_wait():
    mixed = taken()
    mixed.rig.take_calls()
    run(mixed, 12)
    steps = [what for what, _ in mixed.rig.take_calls() if what in (GRAPH, SYNC)]
    assert steps.count(GRAPH) == 12
    in_flight = 1 + np.cumsum([1 if what == GRAPH else -1 for what in steps])
    assert set(in_flight.tolist()) == {1, 2}
    mixed.close()


def test_behind_an_abort_it_waits_for_a_while():
    mixed = taken()
    assert mixed.scheduler.abort(2)
    assert mixed.scheduler.num_freed == 0, "the step in flight names its slot"
    slot = mixed.scheduler.add(9, np.arange(5, dtype=np.int32), max_tokens=4000, eos_ids=[EOS])
    mixed.rig.params.stage(slot, seed_words(slot, 5, 9))
    mixed.special[slot] = 0
    assert mixed.steady.run(mixed.steady.in_flight) == REASON_FREED, "behind that step it is free"
    assert mixed.ring.pop()[1] == [0, 1, 3, 4, 5]
    assert mixed.scheduler.num_running == ROWS
    mixed.forget()
    assert not plans_at_once(slowly(mixed))
    mixed.rig.lib.set_step_ns(0)
    run(mixed, CALM)
    assert any(plans_at_once(slowly(mixed)) for _ in range(4))
    mixed.close()
