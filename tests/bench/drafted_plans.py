"""How long the host takes for a step of 256 rows with drafts: plan with a budget, and settle.

    python tests/bench/drafted_plans.py [--rows 256] [--drafts 7] [--pass-us 300]

A simulated device accepts drafts at random. Times are those of one thread that has a core to itself; the loop without
the GIL makes the same calls.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from _fast.layout import RunEnd, TokenCode
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--pass-us", type=float, default=0.0, help="of a drafter with a pass for each draft; 0: none")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    rows, most, draw = given.rows, given.drafts, np.random.default_rng(1)
    tokens, updates = rows * (1 + most), 1 << 16
    scheduler = Scheduler(
        max_slots=rows,
        max_rows=rows,
        max_tokens=max(tokens, 2048),
        max_model_len=8192,
        num_blocks=rows * 512,
        block_size=16,
        max_lines=max(rows, 512),
    )
    times = 0.006 + 0.00003 * np.arange(tokens + 1)
    scheduler.drafts.budget.set_times(times, times, np.zeros(1))
    if given.pass_us:
        passes = np.full(rows + 1, given.pass_us / 1e6)
        scheduler.drafts.budget.times.set_passes(passes, passes)
    plans = [StepPlan(rows, max(tokens, 2048), updates, width=most + 2) for _ in range(2)]
    for number in range(rows):
        scheduler.add(number, draw.integers(0, 9, 8).astype(np.int32), max_tokens=8000, drafts=most)
    end, flying, planned, settled, drafts = int(TokenCode.END), None, [], [], []
    for _ in range(given.steps):
        plan = plans[scheduler.next_step % 2]
        begun = time.perf_counter()
        scheduler.schedule(plan)
        planned.append(time.perf_counter() - begun)
        places = plan.num_tokens - plan.row_start[plan.num_rows]
        share = np.full(plan.num_rows, places // plan.num_rows) + (np.arange(plan.num_rows) < places % plan.num_rows)
        share = np.minimum(share, np.asarray(plan.row_len)[: plan.num_rows] - 1)
        right = np.minimum(draw.geometric(0.35, plan.num_rows) - 1, share)
        runs = np.full((plan.num_rows, plan.width), 7, np.int32)
        runs[np.arange(plan.width) > right[:, None]] = end
        runs -= (runs == end) * (most + RunEnd.VERIFIED * share)[:, None].astype(np.int32)
        drafts.append(int(share.sum()))
        if flying is not None:
            begun = time.perf_counter()
            scheduler.commit(*flying)
            settled.append(time.perf_counter() - begun)
        flying = plan, runs.reshape(-1)
    half = given.steps // 2
    plan_us, settle_us = (float(np.median(each[half:])) * 1e6 for each in (planned, settled))
    print(f"{rows} rows, {most} drafts each, {np.mean(drafts[half:]):.0f} verified: plan {plan_us:.1f} us, settle")
    print(f"{settle_us:.1f} us, together {plan_us + settle_us:.1f} us (medians of {half} steps)")


if __name__ == "__main__":
    main()
