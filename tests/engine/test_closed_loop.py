"""The results of pace and scheduler for many concurrent clients, in simulated time."""

import numpy as np

from tests.bench.loads import conversations
from tests.engine import closed_loop
from tests.engine.closed_loop import run


def test_conversations_that_never_leave_a_step_without_prompts_do_not_wait_for_one():
    """Pace once learned the cost of keys from pure decode steps only, so prompts got no more than the minimum."""
    seen = run(conversations(), 256, 14.0)
    median, slow = np.percentile(seen.waits, [50, 90])
    print(f"{seen.tokens / seen.seconds:,.0f} tokens/s, first after {median * 1e3:.0f} ms, p90 {slow * 1e3:.0f}")
    assert median < 0.050
    assert slow < 0.100
    assert seen.tokens / seen.seconds > 13_000


def test_a_crowd_of_equal_prompts_is_computed_within_some_steps():
    seen = run([(512, 128)], 256, 16.0)
    median, slow = np.percentile(seen.waits, [50, 90])
    print(f"{seen.tokens / seen.seconds:,.0f} tokens/s, first after {median * 1e3:.0f} ms, p90 {slow * 1e3:.0f}")
    assert median < 0.400
    assert slow < 0.500
    assert seen.tokens / seen.seconds > 6_900


def test_steps_that_fill_the_device_leave_more_for_tokens(monkeypatch):
    def answered() -> float:
        seen = run([(512, 128)], 256, 60.0)
        return seen.tokens / seen.seconds

    full = answered()
    monkeypatch.setattr(closed_loop, "fullness", lambda tokens: 1.0)
    assert full > 1.015 * answered()


def test_few_streams_wait_for_little_more_than_their_own_prompt():
    seen = run(conversations(), 4, 10.0)
    assert np.percentile(seen.waits, 50) < 0.014


def test_idle_rows_fill_steps_and_slow_the_others_by_half_at_most():
    """Four streams alone, and with as many lines of a batch as an engine takes."""
    alone, both = run([(512, 128)], 4, 12.0), run([(512, 128)], 4, 12.0, idle=324)
    first, gap = (
        [float(np.percentile(seen.waits if what else seen.gaps, 50)) for seen in (alone, both)] for what in (1, 0)
    )
    print(f"first token {first[0] * 1e3:.1f} -> {first[1] * 1e3:.1f} ms, gap {gap[0] * 1e3:.2f} -> {gap[1] * 1e3:.2f}")
    print(f"{alone.tokens / 6:,.0f} -> {both.tokens / 6:,.0f} tokens/s, and {both.idle_tokens / 6:,.0f} of the batch")
    assert first[1] < 1.5 * first[0]
    assert gap[1] < 1.5 * gap[0]
    assert both.idle_tokens > 2 * alone.tokens


def test_idle_rows_without_others_run_as_others_do():
    idle, others = run([(512, 128)], 0, 12.0, idle=324), run([(512, 128)], 324, 12.0)
    print(f"{idle.idle_tokens / 6:,.0f} and {others.tokens / 6:,.0f} tokens/s")
    assert idle.idle_tokens > 0.95 * others.tokens
