"""The cost of metrics, the status line and scrapes, as a share of each second at 256 streams; JSON.

Each part is called as the server calls it, on a ready server's own objects: a step's numbers, a token's gap, an
answer's observations, a scrape (in the pool, every 15 s), a status line (every 10 s). Without a trace an iteration only
compares with None, which is too short to measure. Shares are of one core at the given tokens per second, as if all of
the work delayed the tokens; most of it runs concurrently with the steps. Run: python -m tests.bench.watching_cpu
[--rates 2300,22335] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from engine.base.stats import StepStats
from server.ops.metrics import exposition
from server.ops.status import INTERVAL_S, StatusLine
from server.state import AppState
from tests.bench.stream_cpu import ROOM
from tests.end_to_end.inside import InsideServer, flags_of, inside

STREAMS, ANSWER, SCRAPE_S = 256, 128, 15.0  # tokens of an answer; seconds between scrapes
STEP = StepStats(
    num_tokens=STREAMS, num_sampled=STREAMS, schedule_s=1e-4, launch_s=1e-4, wait_s=1e-2, commit_s=1e-4, device_s=1e-2
)


def took_us(work: Callable[[], Any], times: int, turns: int = 20) -> float:
    """Microseconds of this thread's CPU per call: the mean of a turn, the median over the turns."""
    found = []
    for _ in range(turns):
        begun = time.thread_time()
        for _ in range(times):
            work()
        found.append((time.thread_time() - begun) / times * 1e6)
    return round(median(found), 3)


async def parts(state: AppState) -> dict[str, float]:
    """Microseconds of each part."""
    metrics, line = state.metrics, StatusLine(state)
    ends = [name for name in metrics.histograms if name.startswith(("request_", "e2e_", "time_to_first"))]

    def ended() -> None:
        for name in ends:
            metrics.observe(name, 0.5)
        metrics.http("POST", 200, "/v1/chat/completions", 0.5)

    def collected() -> None:
        state.engine.stats.steps += 1  # a line is written only after some work
        line.write()

    return {
        "a step": took_us(lambda: metrics.step(STEP), 500),
        "a token": took_us(lambda: metrics.gaps.observe(0.01), 2000),
        "an answer": took_us(ended, 300),
        "a scrape": took_us(lambda: exposition(metrics), 3),
        "a status line": took_us(collected, 20),
    }


def share(found: dict[str, float], rate: float) -> float:
    """Percent of a second at `rate` tokens per second."""
    each = found["a step"] / STREAMS + found["a token"] + found["an answer"] / ANSWER
    return round((rate * each + found["a scrape"] / SCRAPE_S + found["a status line"] / INTERVAL_S) / 1e4, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", default="2300,22335", help="tokens per second: two cores' and an H100's, of small models"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    async def measured(server: InsideServer) -> dict[str, float]:
        return await parts(server.state)

    with inside(*flags_of(**ROOM), "--disable-access-log") as server:
        found = server.call(lambda: measured(server))
    report = {"us": found, "percent": {rate: share(found, float(rate)) for rate in args.rates.split(",")}}
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
