"""The order of a step's launches on several ranks, on a stand-in driver whose launches block and streams interleave."""

import numpy as np
import pytest

from _fast.layout import GraphKind, TokenCode
from _fast.scheduler import Scheduler
from engine.base.errors import scope_of
from tests.fast.oracles.ranks import EXCHANGE, TOKEN, Driver, RanksRig
from tests.fast.oracles.runtime import seed_words

ROWS, TOKENS, SLOTS = 4, 32, 8


class Engine:
    """Two steps in flight; some steps in a row fail behind their prep, without an exchange, and are not waited for."""

    drafts = 0  # of a row, at most; none of them is right

    def __init__(self, driver, seed):
        self.random = np.random.default_rng(seed)
        self.scheduler = Scheduler(
            max_slots=SLOTS, max_rows=ROWS, max_tokens=TOKENS, max_model_len=64, num_blocks=60, block_size=4
        )
        self.width = self.drafts + 2 if self.drafts else 1
        self.rig = RanksRig(driver, ROWS, TOKENS, 128, SLOTS, self.width)
        self.number, self.in_flight, self.settled, self.passes = 0, [], 0, 0
        self.failing = 0  # steps that will fail

    def add(self):
        length, most = int(self.random.integers(1, 30)), int(self.random.integers(1, 12))
        slot = self.scheduler.add(self.number, np.zeros(length, np.int32), max_tokens=most, drafts=self.drafts)
        if slot >= 0:
            self.rig.params.stage(slot, seed_words(slot, length, self.number))
            self.number += 1

    def launch(self):
        launcher, index = self.rig.launcher, self.scheduler.next_step % 3
        launcher.wait_until_read(index)
        plan = self.rig.plans[index]
        if not self.scheduler.schedule(plan):
            return False
        self.rig.params.pack(plan)
        kind = GraphKind.DECODE if plan.num_decode_rows == plan.num_rows else GraphKind.MIXED
        size = launcher.pick(kind, plan.num_tokens)
        sample = launcher.pick(GraphKind.SAMPLE, plan.num_lines) if plan.num_sampled else 0
        self.passes += plan.depth
        if self.failing:
            self.failing -= 1
            launcher.prep(plan, index)
            self.in_flight.append((plan, index, True))
            return True
        if self.random.random() < 0.5:
            launcher.launch(plan, index, kind, size, sample)
        else:
            launcher.prep(plan, index)
            launcher.replay(kind, size)
            if sample:
                launcher.replay(GraphKind.SAMPLE, sample)
            launcher.finish()
        self.in_flight.append((plan, index, False))
        return True

    def settle(self):
        plan, index, failed = self.in_flight.pop(0)
        if not failed:
            assert self.rig.launcher.wait(index, 5.0)
            if plan.num_sampled:
                assert (self.rig.ring[index] == TOKEN).all()
            self.rig.ring[index][:] = -7
        runs = np.full((ROWS, self.width), TokenCode.END - self.drafts, np.int32)
        runs[:, 0] = TOKEN
        self.scheduler.commit(plan, runs.reshape(-1))
        for slot in self.scheduler.freed_slots[: self.scheduler.num_freed]:
            self.rig.params.forget(slot)
        self.settled += 1

    def run(self, steps):
        while self.settled < steps:
            if self.random.random() < 0.4:
                self.add()
            if self.random.random() < 0.05:
                self.failing = 6
            launched = self.launch()
            if self.in_flight and (not launched or len(self.in_flight) == 2):
                self.settle()


class Drafting(Engine):
    """Rows have drafts, which rank 0 guesses in passes between prep and forward."""

    drafts = 3


@pytest.mark.parametrize("made", [Engine, Drafting])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_are_launched_in_an_order_that_cannot_block(ranks, made):
    driver = Driver(ranks, seed=ranks)
    engine = made(driver, seed=ranks)
    engine.run(200)
    driver.finish()
    assert not driver.faults
    assert engine.number > 20
    assert driver.launched == [*range(ranks)] * (len(driver.launched) // ranks)
    assert (engine.passes > 50) == bool(engine.drafts)
    assert [stream.passes for stream in driver.streams] == [engine.passes] * ranks


def test_a_launcher_that_waits_for_the_first_rank_alone_is_found():
    driver = Driver(3, awaits=lambda rank: rank == 0)
    Engine(driver, seed=0).run(400)
    assert driver.faults == {"a record was rewritten unread"}


class StepAhead(Driver):
    """Launches each step on further ranks only once the next step has been launched on the first."""

    def GraphLaunch(self, graph, stream):
        if stream > 1:
            self.late.append((graph, stream))
            return 0
        code = super().GraphLaunch(graph, stream)
        for late in self.late:
            code = code or super().GraphLaunch(*late)
        self.late = []
        return code

    late: list = []


class PassesLater(Driver):
    """Launches rank 0's passes behind its forward."""

    def GraphLaunch(self, graph, stream):
        kind = GraphKind(graph // 1000 - 1)
        if stream == 1 and kind in (GraphKind.DRAFT, GraphKind.FURTHER):
            self.late.append((graph, stream))
            return 0
        code = super().GraphLaunch(graph, stream)
        if stream == 1 and kind == GraphKind.MIXED:
            for late in self.late:
                code = code or super().GraphLaunch(*late)
            self.late = []
        return code


def test_passes_that_rank_0_launches_behind_its_forward_are_found():
    driver = PassesLater(2)
    driver.late = []
    with pytest.raises(RuntimeError, match="returned 999"):
        Drafting(driver, seed=0).run(50)
    assert "deadlock" in driver.faults


def test_a_launcher_that_begins_a_step_early_on_rank_0_is_found():
    driver = StepAhead(2)
    driver.late = []
    with pytest.raises(RuntimeError, match="returned 999"):
        Engine(driver, seed=0).run(50)
    assert "deadlock" in driver.faults


class OnRank0Alone(Driver):
    """Rank 0's choice has an exchange that no other rank has."""

    def actions(self, kind, rank):
        more = [EXCHANGE] if kind in (GraphKind.STEP, GraphKind.SAMPLE) and rank == 0 else []
        return super().actions(kind, rank) + more


def test_an_exchange_on_rank_0_alone_is_found():
    driver = OnRank0Alone(2)
    with pytest.raises(RuntimeError, match="returned 999"):
        Engine(driver, seed=0).run(50)
    assert driver.faults == {"deadlock"}


def test_graphs_are_given_for_every_rank_and_ranks_before_graphs():
    rig = RanksRig(Driver(2), ROWS, TOKENS, 128, SLOTS)
    with pytest.raises(ValueError, match="1 graphs for 2 ranks"):
        rig.launcher.set_graph(GraphKind.STEP, 0, 3, 5000)
    with pytest.raises(ValueError, match="ranks are added before graphs"):
        rig.launcher.add_rank(3, 3)


def test_a_rank_that_has_waited_in_vain_fails_the_wait():
    engine, error = Engine(Driver(2), seed=1), np.zeros(1, np.int32)
    engine.rig.launcher.watch(error.ctypes.data)
    engine.add()
    engine.launch()
    engine.settle()
    engine.add()
    engine.launch()
    error[0] = 1
    with pytest.raises(RuntimeError, match="exchange returned 1: a GPU has waited in vain") as raised:
        engine.settle()
    assert scope_of(raised.value) == "device"
