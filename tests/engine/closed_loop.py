"""A serving loop in simulated time: the real scheduler and pace, clients in a closed loop, steps timed by a formula.

In: lengths of prompts and answers, streams, seconds. Out: times to first tokens, and the number of tokens. A step takes
slightly longer than a step of an 8B on one H100 (tests/bench/results): products as in graphs of their sizes, and the
keys' bytes at the memory's rate. Two steps are in flight, and the next step is planned as late as the pace allows.
Nothing else takes time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from _fast.plan import StepPlan
from _fast.scheduler import IDLE, Scheduler
from engine.kernels import tune
from engine.kernels.target import Target
from engine.run.pace import Pace
from engine.step.sizes import mixed_sizes
from engine.step.step import StepTimes

ROWS, TOKENS, TILE = 256, 2048, 128
HIDDEN, INNER = 4096, 12288
CARD = Target("cuda", "sm_90", 132, 32, 227 << 10)
SIZES = mixed_sizes(TOKENS)
# Tokens of a graph -> milliseconds: 36 times a layer's products, plus a microsecond per token for the rest.
PRODUCTS = {
    1: 5.7, 32: 5.9, 64: 6.3, 128: 6.5, 256: 7.6, 384: 9.4, 512: 11.2, 576: 13.5, 640: 15.0, 704: 17.0, 768: 17.3,
    832: 22.1, 896: 21.7, 960: 21.7, 1024: 22.0, 1152: 25.6, 1280: 28.4, 1408: 30.4, 1536: 33.0, 1664: 38.1, 1792: 41.6,
    1920: 41.9, 2048: 43.6,
}  # fmt: skip
KEY_S = 147_456 / 3.0e12 * 1.11  # seconds to read the keys and values of one token in all layers
# Seconds: a step's launch; from an answer to the next request; the wait for a step's end, which is never 0.
LAUNCH_S, TURN_S, WAITED_S = 0.0002, 0.003, 0.001
IDLE_CLIENT, IDLE_LENGTHS = -1, (512, 128)


@dataclass(slots=True)
class Seen:
    """Results of the requests that were sent in the second half of the time."""

    waits: list[float]  # seconds to first tokens
    tokens: int
    seconds: float
    gaps: list[float] = field(default_factory=list)  # seconds between two tokens of an answer
    idle_tokens: int = 0  # of idle requests


@dataclass(slots=True)
class Asked:
    client: int  # IDLE_CLIENT: an idle request
    at: float
    emitted: float = 0.0  # time of the newest token


def step_seconds(plan: StepPlan) -> float:
    rows = plan.num_rows
    decodes = np.asarray(plan.row_len)[:rows] == 1
    keys = float(np.asarray(plan.row_computed)[:rows][decodes].sum())
    size = SIZES[bisect_left(SIZES, plan.num_tokens)] if plan.num_decode_rows < rows else rows
    return float(np.interp(size, [*PRODUCTS], [*PRODUCTS.values()])) * 1e-3 + keys * KEY_S + 0.0003


def fullness(tokens: int) -> float:
    """As in kernels/tune for an 8B on an H100."""
    return tune.fullness(CARD, tokens, INNER, HIDDEN)


def run(lengths: Sequence[tuple[int, int]], streams: int, seconds: float, idle: int = 0) -> Seen:
    """Runs the clients, which send requests of these lengths cyclically, and `idle` idle requests at any time."""
    scheduler = Scheduler(
        max_slots=2 * ROWS, max_rows=ROWS, max_tokens=TOKENS, max_model_len=4096, num_blocks=24_000, block_size=16,
        prefix_caching=False,
    )  # fmt: skip
    plans = [StepPlan(ROWS, TOKENS, ROWS * 256) for _ in range(3)]
    pace = Pace(TOKENS, TILE, fullness)
    coming = [(0.0002 * client, client) for client in range(streams)]
    coming += [(0.0, IDLE_CLIENT)] * idle
    heapq.heapify(coming)
    asked: dict[int, Asked] = {}
    seen = Seen([], 0, seconds / 2)
    flying: tuple[StepPlan, float, float] | None = None  # plan of the step in flight, its begin, its end
    now = 0.0
    while now < seconds:
        if flying is None:
            now = max(now, coming[0][0])
        else:
            step = SimpleNamespace(plan=flying[0], times=StepTimes(started_at=flying[1]))
            now = max(now, min(pace.plan_at(step), flying[2]))
        while coming and coming[0][0] <= now:
            at, client = heapq.heappop(coming)
            number = len(asked)
            prompt, answer = IDLE_LENGTHS if client == IDLE_CLIENT else lengths[number % len(lengths)]
            priority = IDLE if client == IDLE_CLIENT else 0
            ids = np.ones(prompt, np.int32)
            scheduler.add(number, ids, max_tokens=answer, ignore_eos=True, arrival=at, priority=priority)
            asked[number] = Asked(client, at)
        pace.set_budgets(scheduler.shares, TOKENS)
        plan = plans[scheduler.next_step % 3]
        begun = None
        if scheduler.schedule(plan):
            begins = max(now + LAUNCH_S, flying[2] if flying else 0.0)
            begun = plan, begins, begins + step_seconds(plan)
        if flying is not None:
            done, begins, now = flying[0], flying[1], max(now, flying[2])
            scheduler.commit(done, np.full(ROWS, 5, np.int32))
            pace.note(done, flying[2] - begins, WAITED_S)
            report(done, asked, coming, now, seen)
        flying = begun
    return seen


def report(plan: StepPlan, asked: dict[int, Asked], coming: list[tuple[float, int]], now: float, seen: Seen) -> None:
    """Delivers a settled step to the clients; a client whose answer is complete sends its next request."""
    columns = (np.asarray(column)[: plan.num_rows].tolist() for column in (plan.out_request, plan.out_token))
    for number, token in zip(*columns):
        one = asked[number]
        if token >= 0 and one.client == IDLE_CLIENT:
            seen.idle_tokens += now > seen.seconds
        elif token >= 0:
            seen.tokens += now > seen.seconds
            if not one.emitted and one.at > seen.seconds:
                seen.waits.append(now - one.at)
            elif one.emitted > seen.seconds:
                seen.gaps.append(now - one.emitted)
            one.emitted = now
    for number, finish in zip(*(np.asarray(c)[: plan.num_rows].tolist() for c in (plan.out_request, plan.out_finish))):
        if finish:
            heapq.heappush(coming, (now + TURN_S, asked[number].client))
