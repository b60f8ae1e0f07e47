"""Random walks of the whole scheduler for models with states: oracles/states.py checks each run that a step reads.

Like test_scheduler_walk.py, with groups of states, boundaries, and tokens that are computed again.
"""

import random

import numpy as np
import pytest

from _fast.plan import StepPlan
from tests.fast.oracles.states import StateDevice
from tests.fast.test_scheduler_walk import NONE, Walk

TOKENS = [[], [(0, 0)], [(0, 0)], [(0, 0), (1, 6)], [(1, 5)]]  # groups of layers with a KV cache
RUNS = [(1, 1), (3, 2), (66, 5)]
NO_STATES, ALIGN, ALL = 0, 1, 2


class StateWalk(Walk):
    """`runs`: number of blocks of a state and of a tail; `mode`: which states are named."""

    def __init__(self, seed, runs, mode=None, **fixed):
        picks = random.Random(seed + 77)
        tokens = fixed.pop("tokens", None)
        tokens = picks.choice(TOKENS) if tokens is None else tokens
        size = fixed.pop("block_size", None) or picks.choice([1, 2, 4, 8])
        chunk = fixed.pop("chunk", None) or picks.choice([1, 2, 4])
        rows = fixed.pop("max_rows", None) or picks.randint(1, 5)
        room = 64 // size * max(len(tokens), 1) + 2 * runs[0] + runs[1]
        super().__init__(
            seed,
            groups=[*tokens, *[(2, chunk)] * picks.randint(1, 3)],
            block_size=size,
            max_rows=rows,
            state_blocks=runs[0],
            tail_blocks=runs[1],
            state_mode=picks.randrange(3) if mode is None else mode,
            state_every=picks.choice([1, 5, 16]),
            state_share=picks.choice([0.0, 0.1, 0.25, 0.5, 1.0]),
            **{"num_blocks": 1 + int(room * picks.choice([1, 1.5, 3, 6])), **fixed},
        )
        self.groups = tokens
        for number, plan in enumerate(self.plans):
            self.plans[number] = StepPlan(rows, plan.max_tokens, plan.max_updates, run_width=max(runs))
        self.device = StateDevice(self.rng, tokens, size, self.draw, chunk, runs)
        self.device.settled_of = lambda slot: self.scheduler.seqs.snapshot(slot)["committed"]
        self.redone = set()  # (step, slot)
        self.repeated = 0

    def hints(self, length):
        return {"boundaries": sorted({self.rng.randint(1, length) for _ in range(self.rng.choice([0, 0, 1, 3, 8]))})}

    redoing = 0.0

    def settle(self):
        step = self.launched[0][0].step_id
        super().settle()
        self.device.settled_step = step
        if self.launched and self.rng.random() < self.redoing:
            self.redo(self.launched[0][0])

    def redo(self, plan):
        """Computes the position in flight again, as a grammar would, or replaces it by tokens that the host knows."""
        slot = self.rng.choice(list(plan.row_slot[: plan.num_rows]))
        request, settler = self.by_slot[slot], self.scheduler.settler
        facts = self.scheduler.seqs.snapshot(slot)
        if request.broken or request.media or request.number not in self.live:
            return
        if (facts["choosing"], facts["in_flight"]) != (1, 1):
            return
        known = []
        if self.rng.random() < 0.5 and settler.room(slot) > 1:
            known = [self.rng.randrange(4) for _ in range(self.rng.randint(1, min(settler.room(slot) - 1, 12)))]
            assert settler.extend(slot, np.array(known, np.int32))
        elif not settler.redo(slot):
            return
        del request.tokens[-1]
        del request.identities[len(request.tokens) :]
        self.device.last[slot] = request.tokens[-1]
        if not known:
            request.computed = len(request.tokens) - 1
        request.tokens += known
        request.settled += len(known)
        self.redone.add((plan.step_id, slot))
        self.repeated += 1

    def check_row(self, plan, row, token, forced, broken, old):
        if (plan.step_id, plan.row_slot[row]) in self.redone:
            self.redone.discard((plan.step_id, plan.row_slot[row]))
            assert (plan.out_token[row], plan.out_finish[row]) == (-1, NONE)
            return
        super().check_row(plan, row, token, forced, broken, old)

    def check_books(self):
        scheduler, ledger = self.scheduler, self.scheduler.ledger()
        assert ledger["free"] + ledger["cached"] + ledger["used"] == ledger["total"]
        held = [
            block for slot in self.by_slot for g in range(len(self.groups)) for block in scheduler.tables.row(slot, g)
        ]
        blocks = {block for block in held if block}
        runs = set()
        for slot in self.by_slot:
            row = scheduler.states.row(slot)
            runs |= {row[name] for name in ("base_run", "old_run", "write_run", "tail_run")} - {0}
        for plan, *_ in self.launched:
            for column in plan.states[5:9]:  # runs of checkpoints
                runs |= set(column[: plan.num_rows]) - {0}
                # A decode row on an accelerator writes no checkpoint: its base moves by one chunk.
                assert self.device.chunk == 1 or not any(column[: plan.num_decode_rows])
        members = [block for run in runs for block in scheduler.pool.run(run)]
        assert len(set(members)) == len(members)
        assert not blocks & set(members)
        assert ledger["used"] == len(blocks) + len(members)
        assert ledger["runs_used"] == len(runs)
        idle = sum(len(scheduler.pool.idle_runs(place)) for place in (3, 4)) * self.settings["state_blocks"]
        assert idle <= max(self.settings["state_share"] * ledger["total"], self.settings["state_blocks"])
        assert not idle or self.settings["state_share"]

    def check_names(self, ledger):
        named = self.scheduler.state_counts["named"]
        # With attention layers a state belongs to a named block, and has no index entry of its own.
        in_index = named if (0, 0) not in self.groups else 0
        assert ledger["cached"] == ledger["index_entries"] - in_index + named * self.settings["state_blocks"]

    def check_shares(self, plan, before, after):
        if self.settings["state_mode"] == NO_STATES:  # in other modes a chunk may end after its last checkpoint
            super().check_shares(plan, before, after)

    def run(self, steps, redoing=0.1, **chances):
        self.redoing = redoing
        super().run(steps, **chances)


@pytest.mark.parametrize("runs", RUNS, ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(24))  # 10,000 steps
def test_every_row_reads_the_state_of_its_own_prefix(seed, runs):
    StateWalk(seed, runs).run(140)


@pytest.mark.parametrize("seed", range(8))
def test_a_position_that_is_computed_again_overwrites_its_place(seed):
    """A grammar that activates in the middle of a row, and its jumps; also in chunks of one token."""
    walk = StateWalk(seed, (3, 2), max_chunk=seed % 2, num_blocks=400)
    walk.run(120, redoing=0.7, arrivals=0.3)
    assert walk.repeated > 5


@pytest.mark.parametrize("runs", RUNS, ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(8))
def test_failed_steps_leave_no_state_behind(seed, runs):
    StateWalk(seed, runs).run(100, failing=0.1, sparing=0.5 * (seed % 2))


@pytest.mark.full
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("runs", RUNS, ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(1000, 1700))  # 1,050,000 steps
def test_the_long_form_of_the_walk_with_states(seed, runs):
    long = {} if seed % 4 < 2 else {"max_model_len": 200}
    StateWalk(seed, runs, **long).run(500, failing=seed % 3 * 0.02)
