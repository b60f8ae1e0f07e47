"""Random plans of the real scheduler with the engine's other data: the records that prep kernels read.

`walk` yields (plan, staging record, host slots, block size) for each step: chunked prompts, decode rows whose last
sample is still on the device, prefix hits, preemption, aborts. The caller owns the device side and calls `sampled`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from _fast.layout import SLOT_WORDS, UPDATE_WORDS, Header, RowFlag, RunEnd, SlotWord, TokenCode
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from engine.cache.layout import CacheLayout
from engine.cache.tokens import FullSpec
from engine.cache.window import SlidingSpec
from engine.step.backend.host.slots import HostSlots
from engine.step.rows import RowArrays

MAX_LEN = 64


def words_of(slot: int, prompt_len: int, delta: int, draw: random.Random) -> np.ndarray:
    """A slot's words as the host sends them, SLOT_WORDS int32: random numbers, the floats as their bits."""
    words = np.zeros(SLOT_WORDS, np.int32)
    known = {SlotWord.SLOT: slot, SlotWord.PROMPT_LEN: prompt_len, SlotWord.POSITION_DELTA: delta}
    for number in SlotWord:
        if number < SlotWord.LAST_TOKEN:
            words[number] = known.get(number, np.float32(draw.random()).view(np.int32))
    return words


@dataclass
class Walk:
    """A small version of an engine's host side."""

    seed: int
    axes: int = 1
    num_blocks: int = 60
    groups: tuple[tuple[int, int], ...] = ((0, 0),)  # (kind, window)
    drafts: int = 0  # most drafts of a row
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.block_size = draw.choice([1, 2, 4, 8])
        self.max_rows = draw.randint(1, 7)
        self.max_slots = self.max_rows + draw.randint(0, 5)
        self.max_tokens = self.max_rows + draw.choice([0, 5, 40])
        self.max_blocks = -(-MAX_LEN // self.block_size)
        self.scheduler = Scheduler(
            max_slots=self.max_slots,
            max_rows=self.max_rows,
            max_tokens=self.max_tokens,
            max_model_len=MAX_LEN,
            num_blocks=1 + max(self.num_blocks // self.block_size, self.max_blocks + 1) * len(self.groups),
            block_size=self.block_size,
            groups=self.groups,
            max_chunk=draw.choice([0, 3]),
        )
        updates = self.max_rows * (self.max_blocks + 1) * len(self.groups)
        self.width = self.drafts + 2 if self.drafts else 1
        self.plans = [StepPlan(self.max_rows, self.max_tokens, updates, width=self.width) for _ in range(2)]
        if self.drafts and self.seed % 2:  # more rows with drafts than places for them
            times = 1 + np.arange(self.max_rows * 2) // self.max_rows * draw.random()
            self.scheduler.drafts.budget.set_times(times, times, np.zeros(1))
        self.slots = HostSlots(self.max_slots, self.max_blocks, len(self.groups), num_drafts=self.drafts)
        self.verified = 0
        specs = [
            SlidingSpec(1, 8, torch.float32, window) if kind else FullSpec(1, 8, torch.float32)
            for kind, window in self.groups
        ]
        self.layout = CacheLayout(specs, self.block_size)
        self.unsent: dict[int, np.ndarray] = {}
        self.number = 0

    @property
    def capacity(self) -> int:
        return len(self.plans[0].record)

    def add(self) -> None:
        draw = self.draw
        prompt = np.array([draw.randrange(2) for _ in range(draw.choice([1, 2, draw.randint(1, 50)]))], np.int32)
        limit = draw.randint(1, 20)
        slot = self.scheduler.add(
            self.number, prompt, max_tokens=limit, arrival=float(self.number), ignore_eos=True, drafts=self.drafts
        )
        if slot < 0:
            return
        self.number += 1
        slots, delta = self.slots, draw.randint(-len(prompt), 5) if self.axes > 1 else 0
        slots.reset(slot)
        slots.words[slot, SlotWord.LAST_PLACE] = self.scheduler.last_place(slot)
        positions = slots.positions
        positions.prompt_len[slot], positions.delta[slot] = len(prompt), max(delta, -len(prompt))
        if self.axes > 1 and draw.random() < 0.5:
            own = [[draw.randrange(99) for _ in prompt] for _ in range(self.axes)]
            positions.prompts[slot] = np.array(own, np.int32)
        self.unsent[slot] = words_of(slot, len(prompt), int(positions.delta[slot]), draw)
        self.unsent[slot][SlotWord.LAST_PLACE] = self.scheduler.last_place(slot)

    def record(self, plan: StepPlan) -> np.ndarray:
        """The plan's record, with parameters and positions after its updates; the rest is garbage."""
        size = plan.tail_at + UPDATE_WORDS * plan.num_updates
        staged = np.full(self.capacity, 0x7F0F0F0F, np.int32)
        staged[:size] = np.asarray(plan.record)[:size]
        rows = range(plan.num_rows)
        for row in rows:
            words = self.unsent.pop(plan.row_slot[row], None)
            if words is not None:
                staged[size : size + SLOT_WORDS] = words
                staged[Header.NUM_PARAMS] += 1
                size += SLOT_WORDS
        given = [self.slots.positions.prompts.get(plan.row_slot[row]) for row in rows]
        if any(positions is not None for positions in given):
            staged[Header.POSITIONS_AT] = size
            for row, positions in enumerate(given):
                start, first = plan.row_start[row], plan.row_computed[row]
                length = plan.row_start[row + 1] - start
                for axis in range(self.axes):
                    for k in range(length):
                        at = first + k
                        inside = positions is not None and at < positions.shape[1]
                        staged[size + axis * plan.num_tokens + start + k] = positions[axis, at] if inside else at
            size += self.axes * plan.num_tokens
        staged[Header.USED_LEN] = size
        return staged

    def steps(self, count: int) -> Iterator[tuple[StepPlan, np.ndarray]]:
        """Plans with rows, and their records; two steps are in flight if there is work for two."""
        launched: list[tuple[StepPlan, np.ndarray]] = []
        for number in range(count):
            if self.draw.random() < 0.5:
                self.add()
            if self.number and self.draw.random() < 0.05:
                self.scheduler.abort(self.draw.randrange(self.number))
            plan = self.plans[number % 2]
            self.scheduler.schedule(plan)
            if plan.num_rows:
                yield plan, self.record(plan)
                tokens = self.sample(plan)
                launched.append((plan, tokens))
            if len(launched) == 2 or (launched and not plan.num_rows):
                self.scheduler.commit(*launched.pop(0))

    def sample(self, plan: StepPlan) -> np.ndarray:
        """Draws the step's tokens and stores them in the host's slots."""
        if self.drafts:
            return self.runs(plan)
        tokens = np.full(plan.num_rows, -1, np.int32)
        for row in range(plan.num_rows):
            if plan.row_flags[row] & RowFlag.SAMPLE:
                tokens[row] = self.draw.randrange(2, 90)
                self.slots.last_token[plan.row_slot[row]] = tokens[row]
        return tokens

    def runs(self, plan: StepPlan) -> np.ndarray:
        """Draws a run for each sampled row, as if some of its drafts were right, and the drafts of its next step."""
        rows, slots, draw = self.slots.resolve(RowArrays(plan)), self.slots, self.draw
        runs = np.full((plan.num_rows, self.width), TokenCode.END, np.int32)
        for row in rows.sampled.tolist():
            slot, fed = int(rows.slots[row]), bool(rows.flags[row] & RowFlag.FEED)
            drafts = int(rows.lens[row]) - 1 if fed else 0
            self.verified += drafts
            count = 1 + draw.randint(0, drafts)
            runs[row, :count] = [draw.randrange(2, 90) for _ in range(count)]
            slots.last_token[slot] = runs[row, count - 1]
            found = draw.choice([0, draw.randint(0, self.drafts), self.drafts])
            slots.words[slot, SlotWord.LENGTH] = rows.computed[row] + rows.lens[row] - drafts + count
            slots.words[slot, SlotWord.NUM_DRAFTS] = found
            slots.tensors.survivals.survivals[slot] = torch.tensor(
                sorted([draw.choice([1, 9, 99, draw.randrange(1, 32768)]) for _ in range(self.drafts)], reverse=True)
            )
            slots.tensors.drafts[slot] = torch.tensor([draw.randrange(2, 90) for _ in range(self.drafts)])
            runs[row, count:] -= found + RunEnd.VERIFIED * drafts
        return runs.ravel()
