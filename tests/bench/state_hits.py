"""Measures the prefix cache's hit rate for agents and a model with states: `python -m tests.bench.state_hits`.

Only the scheduler runs: it plans and commits requests with drawn tokens, without a model. Each agent's prompt grows
from --first to --last tokens: a prompt has the previous prompt, its answer and a tool's result; 94 % of its tokens are
old. Agents take turns, --rows at a time. Sizes are of Qwen3.6-35B-A3B on a card of 80 GB: a state takes 198 blocks, a
tail 66. Prints the tokens that the cache finds, and the tokens that a cache of unlimited size would find.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import numpy as np

from _fast.plan import StepPlan
from _fast.scheduler import Scheduler

STATE, TAIL, BLOCK = 198, 66, 16
ANSWER, STEP, SHARED = 200, 8192, 4000  # tokens of an answer, a step, the shared system text


@dataclass(eq=False)
class Agent:
    """The conversation of one agent."""

    tokens: np.ndarray  # tokens of the newest prompt and its answer
    turns: list[int] = field(default_factory=list)  # starts of turns
    known: int = 0  # tokens that an earlier request has computed


def scheduler_of(blocks: int, rows: int, longest: int) -> Scheduler:
    return Scheduler(
        max_slots=rows, max_rows=rows, max_tokens=STEP, max_model_len=longest, num_blocks=blocks, block_size=BLOCK,
        groups=[(0, 0), (2, 16)], state_blocks=STATE, tail_blocks=TAIL,
    )  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, float]:
    draw = np.random.default_rng(args.seed)
    longest = args.last + 4 * ANSWER
    scheduler = scheduler_of(args.blocks, args.rows, longest)
    updates = args.rows * (longest // BLOCK + 1)
    plans = [StepPlan(args.rows, STEP, updates, run_width=STATE) for _ in range(2)]
    shared = draw.integers(0, 200_000, SHARED).astype(np.int32)
    first = [np.concatenate([shared, draw.integers(0, 200_000, args.first - SHARED)]) for _ in range(args.agents)]
    agents = [Agent(tokens.astype(np.int32), [SHARED]) for tokens in first]
    waiting, live = list(range(args.agents)), dict[int, int]()
    asked = found = reusable = requests = 0
    while waiting or live:
        while waiting and len(live) < args.rows:
            number = waiting.pop(0)
            agent = agents[number]
            slot = scheduler.add(
                number, agent.tokens, max_tokens=ANSWER, ignore_eos=True, boundaries=agent.turns[:1] + agent.turns[-7:]
            )
            live[slot] = number
            requests += 1
        plan = plans[scheduler.next_step % 2]
        scheduler.schedule(plan)
        scheduler.commit(plan, draw.integers(0, 200_000, args.rows).astype(np.int32))
        for slot in list(scheduler.freed_slots[: scheduler.num_freed]):
            agent = agents[live.pop(slot)]
            answer = draw.integers(0, 200_000, ANSWER).astype(np.int32)
            asked += len(agent.tokens)
            reusable += (max(agent.known, SHARED if requests > args.rows else 0)) // BLOCK * BLOCK
            agent.known = len(agent.tokens)
            grown = int(len(agent.tokens) / 0.94) - len(agent.tokens) - ANSWER
            more = draw.integers(0, 200_000, max(grown, 64)).astype(np.int32)
            agent.turns.append(len(agent.tokens))
            agent.tokens = np.concatenate([agent.tokens, answer, more]).astype(np.int32)
            if len(agent.tokens) < args.last:
                waiting.append(agents.index(agent))
    found = scheduler.prefix_hits
    return {"requests": requests, "asked": asked, "reusable": reusable, "found": found, "ratio": found / reusable}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("agents", 8), ("rows", 8), ("first", 12_000), ("last", 80_000), ("blocks", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
