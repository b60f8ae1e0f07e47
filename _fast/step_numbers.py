"""StepNumbers: a step's counts and the durations of its parts, by name, for Python.

Owner: the reader that popped it from the OutputRing. The C struct of this name in ring.pxd has the same fields.
"""

from typing import NamedTuple


class StepNumbers(NamedTuple):
    """Counts of one step and of the time when it was settled; durations of its parts in seconds; two times of
    time.perf_counter: when its forward was launched, and when its tokens were on the host."""

    step_id: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    running: int
    waiting: int
    blocks_used: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    schedule_s: float
    launch_s: float
    wait_s: float
    commit_s: float
    device_s: float
    gap_s: float
    launched_at: float
    ended_at: float
