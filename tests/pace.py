"""How fast this machine is at the moment, for tests that bound a cost in microseconds.

Their limits were written on a machine where `WORK` takes QUIET_S; on a slower machine, or while other processes share
its core, they grow in proportion. A limit holds for the best of several rounds and has a margin: these tests detect
work that was added, not load of the machine.
"""

from __future__ import annotations

import json
import time

QUIET_S = 0.0075  # CPU seconds of `work()`, on the quiet machine for which the limits were written


def work() -> float:
    """CPU seconds of a fixed piece of Python: calls, strings, dictionaries, JSON."""
    begun = time.thread_time()
    words: dict[str, int] = {}
    for at in range(12_000):
        word = f"word{at % 97} {at}"
        words[word[:6]] = words.get(word[:6], 0) + len(word.partition(" ")[2])
    json.loads(json.dumps(list(words.items()) * 20))
    return time.thread_time() - begun


def slowness(rounds: int = 15) -> float:
    """How many times slower than the quiet machine this one is now; never below 1."""
    return max(1.0, min(work() for _ in range(rounds)) / QUIET_S)
