"""Every delivered step reports its counts and the times of its parts, whether C or Python ran the step."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import engine.run.start
from _fast.layout import TokenCode
from _fast.plan import StepPlan
from _fast.scheduler import Scheduler
from _fast.step_numbers import StepNumbers
from engine.base.config import EngineConfig
from engine.base.errors import StepFailedError
from engine.base.output import columns, from_ring
from engine.base.request import FinishReason
from engine.base.stats import StepStats
from engine.run.loop import DeviceThread
from engine.run.pace import Pace
from engine.run.steady import Handover
from engine.step.rows import RowArrays
from engine.step.step import Home
from server.ops.metrics import Metrics
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_faults import error_of, plant
from tests.engine_kit import answer, prompts, running, text_request

QWEN3 = tiny.checkpoint("qwen3")
PROMPTS = prompts(12, tiny.FIRST_SPECIAL, seed=2, longest=60)
TIMES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 7.0, 8.0)
NOBODY = SimpleNamespace(refused={})  # an admission without refused requests
FIELDS = ("schedule_s", "launch_s", "wait_s", "commit_s", "device_s", "gap_s", "launched_at", "ended_at")


@pytest.mark.parametrize("path", ["host", "device"])
async def test_steps_carry_their_times_and_counts(path, monkeypatch):
    if path == "device":
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(QWEN3) as served:
        seen: list[StepStats] = []
        served.on_step = seen.append
        sent = [text_request(ids, 8, ignore_eos=True, logprobs=k % 2 or None) for k, ids in enumerate(PROMPTS)]
        await asyncio.gather(*[answer(served, request) for request in sent])
    assert [stats.step_id for stats in seen] == list(range(seen[0].step_id, seen[0].step_id + len(seen)))
    assert sum(stats.num_sampled for stats in seen) == 12 * 8
    assert all(stats.by_python for stats in seen)
    assert served.stats.python_steps == served.stats.steps == len(seen)
    for stats in seen:
        assert stats.num_tokens >= stats.num_rows > 0
        assert min(stats.commit_s, stats.device_s) > 0
        assert stats.gap_s == 0.0
    for stats in seen[:-1]:
        assert min(stats.schedule_s, stats.launch_s) > 0


async def test_a_refusal_alone_keeps_the_gauges(caplog):
    async with running(QWEN3, max_num_queued_reqs=4) as served:
        plant(served, {2: ValueError("planted")})
        assert isinstance(await error_of(served), StepFailedError)
        assert served.stats.blocks_total == served.num_blocks


def ended(plan: StepPlan) -> Scheduler:
    """A scheduler whose only step has been settled."""
    scheduler = Scheduler(max_slots=2, max_rows=2, max_tokens=8, max_model_len=32, num_blocks=9, block_size=4)
    scheduler.add(7, np.arange(3, dtype=np.int32), max_tokens=4)
    scheduler.schedule(plan)
    scheduler.commit(plan, np.array([5], np.int32))
    return scheduler


class Steady:
    """Replaces the GIL-free loop: leaves one step to Python and then has nothing to do."""

    def __init__(self, left: Handover) -> None:
        self.left = [replace(left, unpublished=None, may_resume=False), left]
        self.ring = SimpleNamespace(put=lambda output: self.delivered.append(output))
        self.delivered: list = []

    def run(self, previous: object) -> Handover:
        return self.left.pop()

    def learned(self) -> list:
        return []


def test_a_step_that_met_a_full_ring_is_delivered_whole():
    plan = StepPlan(2, 8, 16)
    scheduler = ended(plan)
    numbers = StepNumbers(0, 1, 3, 1, 1, 0, 1, 0, 3, 0, *TIMES)
    thread = DeviceThread.__new__(DeviceThread)
    thread.settler = None
    steady = thread.steady = Steady(Handover(None, plan, numbers, False, None, None, True))
    config = EngineConfig("")
    runtime = SimpleNamespace(
        limits=SimpleNamespace(num_blocks=8), scheduler=scheduler, admission=NOBODY, config=config
    )
    thread.run_steadily(runtime, None, StepStats())
    (output,) = steady.delivered
    assert (output.ids, output.tokens, output.finishes) == ([7], [5], [0])
    wanted = from_ring((numbers, [7], [5], [0], {}, None, []), 8)
    assert output.stats == wanted.stats
    assert not output.stats.by_python
    assert (output.stats.schedule_s, output.stats.device_s, output.stats.gap_s) == (0.1, 0.5, 0.6)


def test_news_name_a_row_once_for_each_token_of_its_run():
    plan = StepPlan(3, 8, 16, width=2)
    scheduler = Scheduler(max_slots=3, max_rows=3, max_tokens=8, max_model_len=32, num_blocks=9, block_size=4)
    for number in (7, 8, 9):
        scheduler.add(number, np.arange(2, dtype=np.int32), max_tokens=4, eos_ids=[6])
    scheduler.schedule(plan)
    step = Home(plan.num_rows, plan.width)
    end, invalid = int(TokenCode.END), int(TokenCode.INVALID)
    step.take_tokens(RowArrays(plan).sampled, np.array([[5, 6], [invalid, end], [4, end]]), 99)
    assert list(step.invalid) == [1]
    assert step.tokens is not None
    scheduler.commit(plan, step.tokens.reshape(-1), np.array([0, FinishReason.ERROR, 0], np.int32))
    ids, tokens, finishes, places = columns(plan)
    assert (ids, tokens, list(places)) == ([7, 7, 8, 9], [5, 6, -1, 4], [0, 2, 3])
    assert finishes == [0, FinishReason.STOP, FinishReason.ERROR, 0]


def test_the_steady_loop_plans_prompts_with_budgets_of_this_moment():
    """Two rows wait for one that runs. The GIL-free loop plans their step, long after Python's last plan."""
    plan = StepPlan(2, 8, 16)
    scheduler = Scheduler(max_slots=3, max_rows=1, max_tokens=8, max_model_len=32, num_blocks=9, block_size=4)
    for number in range(3):
        scheduler.add(number, np.arange(3, dtype=np.int32), max_tokens=4)
    scheduler.schedule(plan)
    seen = []

    class Budgets(Pace):
        def __init__(self) -> None:
            self.left = iter((5, 6))

        def prompt_budget(self, *load: int) -> int:
            return next(self.left)

    class Watched(Steady):
        def run(self, previous: object) -> Handover:
            seen.append((scheduler.shares.prompt_budget, scheduler.shares.max_tokens))
            return super().run(previous)

    thread = DeviceThread.__new__(DeviceThread)
    thread.settler = None
    thread._budget = SimpleNamespace(of=lambda step: 4)
    thread.pace = Budgets()
    thread.steady = Watched(Handover(None, None, StepNumbers(*(0,) * 10, *TIMES), False, None, None, True))
    runtime = SimpleNamespace(scheduler=scheduler, admission=NOBODY)
    thread.run_steadily(runtime, None, StepStats())
    assert seen == [(5, 4), (6, 4)]


def test_a_plan_that_the_steady_loop_made_counts_where_it_is_launched():
    plan = StepPlan(2, 8, 16)
    scheduler = ended(plan)
    thread = DeviceThread.__new__(DeviceThread)
    thread.settler = None
    steady = thread.steady = Steady(Handover(None, None, StepNumbers(*(0,) * 10, *TIMES), False, None, plan, False))
    steady.left = steady.left[1:]
    stats = StepStats(schedule_s=1.0)
    assert thread.run_steadily(SimpleNamespace(scheduler=scheduler, admission=NOBODY), None, stats) == (None, plan)
    assert stats.schedule_s == pytest.approx(1.1)


def test_every_part_of_a_step_has_its_histogram():
    metrics = Metrics()
    for number in (1, 2):
        metrics.step(StepStats(1, 1, 1, **dict(zip(FIELDS, (number * each for each in TIMES)))))
    for name, each in zip(FIELDS[:6], TIMES):
        histogram = metrics.histograms[f"step_{name.removesuffix('_s')}_seconds"]
        assert sum(histogram.counts) == 2
        assert histogram.total == pytest.approx(3 * each)


def test_gaps_are_counted_where_they_were_measured():
    metrics = Metrics()
    for step in (StepStats(num_rows=1, gap_s=3e-6), StepStats(num_rows=1), StepStats(num_rows=1, gap_s=2e-4)):
        metrics.step(step)
    histogram = metrics.histograms["step_gap_seconds"]
    assert sum(histogram.counts) == 2
    assert histogram.total == pytest.approx(203e-6)
