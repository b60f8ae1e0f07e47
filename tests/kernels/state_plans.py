"""Plans of a real scheduler for rows with states, and tables that take the plans."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from _fast.blocks import num_run_ids
from _fast.layout import padded, record_len
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.states import ALL
from engine.kernels.state_inputs import RecordSizes, StateTables, empty_tables

STATES, TAILS = list(range(5)), [0, 1, 5]  # table columns of a run's blocks: a state has 5 blocks, a tail 3
MAX_ROWS, MAX_TOKENS, BLOCKS, SLOTS = 5, 40, 150, 8
UPDATES = MAX_ROWS * 40


class StatePlans:
    """Makes plans; `record` int32 [capacity] holds the newest plan."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.scheduler = Scheduler(
            max_slots=SLOTS, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, max_model_len=120, num_blocks=BLOCKS,
            block_size=4, groups=[(0, 0), (2, 4)], state_blocks=len(STATES), tail_blocks=len(TAILS), state_mode=ALL,
            state_every=8,
        )  # fmt: skip
        self.sizes = RecordSizes(MAX_ROWS, MAX_TOKENS, UPDATES)
        width = max(len(STATES), len(TAILS))
        self.record = np.full(padded(record_len(MAX_ROWS, MAX_TOKENS, UPDATES, width)), -7, np.int32)
        self.plan = StepPlan(MAX_ROWS, MAX_TOKENS, UPDATES, buffer=self.record, run_width=width)

    def tables(self, device: str = "cpu") -> StateTables:
        """Makes tables; rows and checkpoints hold wrong values until a step writes them."""
        ids = num_run_ids(BLOCKS, len(STATES), len(TAILS), SLOTS)
        made = empty_tables(MAX_ROWS, STATES, TAILS, ids, device)
        made.rows.fill_(-9)
        made.checkpoints.fill_(-9)
        return made

    def steps(self, count: int) -> Iterator[StepPlan]:
        """Yields plans, and commits each before the next; adds requests while slots are free."""
        number = 0
        for _ in range(count):
            while self.scheduler.ledger()["slots"] < SLOTS and self.draw.random() < 0.7:
                tokens = self.draw.integers(0, 50, self.draw.integers(1, 90)).astype(np.int32)
                self.scheduler.add(number, tokens, max_tokens=int(self.draw.integers(1, 30)))
                number += 1
            if self.scheduler.schedule(self.plan):
                yield self.plan
                self.scheduler.commit(self.plan, self.draw.integers(0, 50, MAX_ROWS).astype(np.int32))


def same(mine: StateTables, theirs: StateTables) -> bool:
    pairs = ((getattr(mine, name).cpu(), getattr(theirs, name)) for name in ("table", "rows", "checkpoints"))
    return all(torch.equal(a, b) for a, b in pairs)
