"""Measures how fast this machine is at the moment, for tests that bound a cost in microseconds.

The limits in these tests were set on a machine where `work()` takes QUIET_S. On a slower machine, or while other
processes share the core, the limits grow in proportion. A limit holds for the best of several rounds and has a margin:
the tests detect added work, not load of the machine.
"""

from __future__ import annotations

import json
import time

QUIET_S = 0.0075  # CPU seconds of `work()` on the idle machine for which the limits were set


def work() -> float:
    """CPU seconds of a fixed amount of Python work: calls, strings, dictionaries, JSON."""
    begun = time.thread_time()
    words: dict[str, int] = {}
    for at in range(12_000):
        word = f"word{at % 97} {at}"
        words[word[:6]] = words.get(word[:6], 0) + len(word.partition(" ")[2])
    json.loads(json.dumps(list(words.items()) * 20))
    return time.thread_time() - begun


def slowness(rounds: int = 15) -> float:
    """How many times slower this machine is now than the idle reference machine; at least 1."""
    return max(1.0, min(work() for _ in range(rounds)) / QUIET_S)
