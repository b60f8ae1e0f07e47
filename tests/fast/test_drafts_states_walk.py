"""Random walks of the scheduler for models with states whose rows have drafts: no refused draft gets into a state.

Like test_states_walk.py and test_drafts_walk.py together: the device accepts a random number of drafts, refused ones
spoil their places in the row's tail, and two steps are in flight.
"""

import pytest

from _fast.plan import StepPlan
from tests.fast.oracles.states import StateDevice
from tests.fast.test_drafts_walk import FEED, DraftDevice, DraftWalk
from tests.fast.test_states_walk import RUNS, StateWalk


class DraftStateDevice(StateDevice, DraftDevice):
    """Rows with states; a row's place is known to the device alone."""

    def __init__(self, rng, groups, block_size, draw, chunk, sizes, width):
        super().__init__(rng, groups, block_size, draw, chunk, sizes, width - 1)
        self.width = width

    def place_of(self, plan, row, request):
        slot, count = plan.row_slot[row], plan.row_len[row]
        if not plan.row_flags[row] & FEED:
            return plan.row_computed[row], count
        return self.length[slot] - 1, 1 + self.shares[row]


class DraftStateWalk(DraftWalk, StateWalk):
    resting = 0  # a state's rows read the slots' lengths, which only steps with drafts write

    def __init__(self, seed, runs, **fixed):
        super().__init__(seed, runs=runs, **fixed)
        chunk, sizes = self.scheduler.states.chunk, (self.settings["max_rows"], self.settings["max_tokens"])
        self.plans = [StepPlan(*sizes, plan.max_updates, width=self.width, run_width=max(runs)) for plan in self.plans]
        self.device = DraftStateDevice(self.rng, self.groups, self.block_size, self.draw, chunk, runs, self.width)
        self.device.settled_of = lambda slot: self.scheduler.seqs.snapshot(slot)["committed"]

    def hints(self, length):
        return DraftWalk.hints(self, length) | StateWalk.hints(self, length)


@pytest.mark.parametrize("runs", RUNS, ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_reads_the_state_of_its_own_prefix(seed, runs):
    walk = DraftStateWalk(seed, runs)
    walk.run(120, redoing=0, failing=seed % 3 * 0.03, sparing=0.5)
    drafts = walk.scheduler.drafts
    assert [drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens] == walk.counts


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("runs", RUNS, ids=["1", "3", "66"])
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_the_long_form_of_the_walk(seed, runs):
    long = {} if seed % 4 < 2 else {"max_model_len": 200}
    DraftStateWalk(seed, runs, **long).run(500, redoing=0, failing=seed % 3 * 0.02)
