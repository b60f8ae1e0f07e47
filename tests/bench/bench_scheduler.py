"""The scheduler's cost per step on this machine: schedule() and commit(), by case; a table, and JSON with --json.

Each case fills the running rows, then times steps with two in flight, as engine/run/loop runs them. Times are medians
over the steps in microseconds; `p90` includes the steps in which rows cross the end of a block. `prefix` times the
match of one long prompt that is entirely cached. Run: python -m tests.bench.bench_scheduler [--json FILE] [--steps N]
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

PROMPT = 512


def filled(rows, groups=((0, 0),), caching=True, state_blocks=0, tail_blocks=0):
    """A scheduler whose rows have all finished their prompts, and its plans."""
    scheduler = Scheduler(
        max_slots=2 * rows, max_rows=rows, max_tokens=max(2048, rows), max_model_len=8192,
        num_blocks=rows * (128 * len(groups) + 2 * state_blocks + tail_blocks) + 1, block_size=16, groups=groups,
        prefix_caching=caching, state_blocks=state_blocks, tail_blocks=tail_blocks,
    )  # fmt: skip
    plans = [StepPlan(rows, scheduler.max_tokens, 8192 * len(groups), run_width=scheduler.run_width) for _ in range(2)]
    rng = np.random.default_rng(0)
    for k in range(rows):
        scheduler.add(k, rng.integers(0, 1000, PROMPT + k % 16, dtype=np.int32), max_tokens=1400, eos_ids=[1, 2])
    ran = 0
    while ran < 2 or plans[0].num_decode_rows < rows:
        scheduler.schedule(plans[0])
        scheduler.commit(plans[0], np.full(rows, 7, np.int32))
        ran += 1
    return scheduler, plans


def decode_case(rows, steps, **options):
    """Microseconds of schedule() and commit() for `rows` rows that decode."""
    scheduler, plans = filled(rows, **options)
    sampled = np.full(rows, 7, np.int32)
    clock = time.perf_counter_ns
    schedule, commit = [], []
    scheduler.schedule(plans[0])
    for k in range(1, steps):
        t0 = clock()
        scheduler.schedule(plans[k % 2])
        t1 = clock()
        scheduler.commit(plans[(k - 1) % 2], sampled)
        t2 = clock()
        schedule.append((t1 - t0) / 1e3)
        commit.append((t2 - t1) / 1e3)
    assert plans[(steps - 1) % 2].num_decode_rows == rows
    return {"schedule": schedule, "commit": commit}


def prefix_case(length, rounds=20):
    """Microseconds of the step that admits a prompt: with the whole prefix cached, and with nothing cached."""
    scheduler = Scheduler(
        max_slots=4, max_rows=2, max_tokens=length + 16, max_model_len=length + 64,
        num_blocks=(length // 16 + 4) * 3, block_size=16, hash_key=bytes(16),
    )  # fmt: skip
    plan = StepPlan(2, length + 16, length)
    tokens = np.arange(length, dtype=np.int32)
    times = {"cold": [], "warm": []}
    for k in range(rounds):
        scheduler.reset_prefix_cache()
        for name in ("cold", "warm"):
            scheduler.add(k, tokens, max_tokens=1)
            t0 = time.perf_counter_ns()
            scheduler.schedule(plan)
            scheduler.commit(plan, np.full(2, 7, np.int32))
            times[name].append((time.perf_counter_ns() - t0) / 1e3)
    return times


def run(steps):
    """Runs every case: name -> part -> {p50, p90}."""
    cases = {f"decode, {rows} rows": decode_case(rows, steps) for rows in (1, 32, 256)}
    cases["decode, 256 rows, no prefix cache"] = decode_case(256, steps, caching=False)
    cases["decode, 256 rows, full + sliding group"] = decode_case(256, steps, groups=((0, 0), (1, 256)))
    cases["decode, 256 rows, full group + states"] = decode_case(
        256, steps, groups=((0, 0), (2, 16)), state_blocks=198, tail_blocks=24
    )
    cases["prompt of 8,192 tokens"] = prefix_case(8192)
    return {
        name: {
            part: {"p50": round(statistics.median(us), 2), "p90": round(statistics.quantiles(us, n=10)[-1], 2)}
            for part, us in parts.items()
        }
        for name, parts in cases.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    result = run(options.steps)
    print(f"{'case':42} {'part':10} {'p50 us':>8} {'p90 us':>8}")
    for name, parts in result.items():
        for part, value in parts.items():
            print(f"{name:42} {part:10} {value['p50']:8.2f} {value['p90']:8.2f}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": platform.processor() or platform.machine(), "us": result}, indent=1)
        )


if __name__ == "__main__":
    main()
