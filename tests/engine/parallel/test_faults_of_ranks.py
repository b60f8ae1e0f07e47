"""A rank that lacks memory, falls off, hangs or is late: the step ends for all ranks. Mistakes in a split are found."""

import asyncio
import threading

import numpy as np
import pytest
import torch

import engine.parallel.host
import engine.parallel.pieces
import engine.run.start
from engine import Engine, EngineConfig, FinishReason
from engine.base.config import FailureLimits
from engine.base.errors import DeviceLostError, DeviceOutOfMemoryError
from engine.layers.norm import Normed
from engine.step.backend.device.forwards import RankForward
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.kit import harness, split
from tests.engine.parallel.test_running import PROMPTS, QWEN2, expected, greedy
from tests.engine.parallel.test_split_models import LIMIT, load, tokens
from tests.engine.test_faults import LOST, OOM
from tests.engine_kit import SMALL, answer, running
from tests.models.harness import Harness


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def fault(request, monkeypatch):
    """A function that is called in the eager forwards of one rank of two, which have devices."""
    planted = []
    eager = RankForward.eager

    def forward(self, *args):
        if planted and self.rank.number == request.param:
            planted[0]()
        return eager(self, *args)

    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    monkeypatch.setattr(RankForward, "eager", forward)
    return planted


async def test_a_rank_that_lacks_memory_starts_requests_over(fault):
    def once():
        fault.clear()
        raise OOM

    async with running(QWEN2, tensor_parallel=2, enforce_eager=True) as served:
        fault.append(once)
        many = await asyncio.gather(*(answer(served, greedy(number)) for number in range(len(PROMPTS))))
        assert many == [[expected(number)] for number in range(len(PROMPTS))]
        assert not fault


async def last_of(served, number):
    async with served.submit(greedy(number)) as stream:
        return [delta async for delta in stream][-1]


async def started(**settings):
    """An engine on two ranks, and the errors of its end."""
    served, deaths = Engine(EngineConfig(str(QWEN2), **SMALL, tensor_parallel=2, enforce_eager=True, **settings)), []
    await served.start()
    served.on_death = deaths.append
    return served, deaths


async def test_a_rank_that_falls_off_is_a_lost_device(fault):
    def lost():
        raise LOST

    served, deaths = await started()
    fault.append(lost)
    lasts = await asyncio.gather(*(last_of(served, number) for number in range(4)))
    assert {last.finish_reason for last in lasts} == {FinishReason.ERROR}
    assert all(isinstance(last.error, DeviceLostError) for last in lasts)
    assert (served.state, len(deaths)) == ("dead", 1)
    await served.stop(1)


async def test_a_rank_that_hangs_ends_the_engine(fault, caplog):
    go = threading.Event()
    served, deaths = await started(step_timeout=0.2, failures=FailureLimits(stall_exit=0.3))
    fault.append(lambda: go.wait(20))
    lasts = await asyncio.gather(*(last_of(served, number) for number in range(4)))
    assert all(isinstance(last.error, DeviceLostError) for last in lasts)
    assert (served.state, len(deaths)) == ("dead", 1)
    go.set()
    await served.stop(1)


async def test_a_rank_without_memory_in_every_step_ends_its_request(fault):
    def always():
        raise OOM

    served, _ = await started(failures=FailureLimits(oom=3))
    fault.append(always)
    last = await last_of(served, 0)
    assert isinstance(last.error, DeviceOutOfMemoryError | DeviceLostError)
    await served.stop(1)


async def test_ranks_that_come_late_change_nothing(fault):
    draw = np.random.default_rng(0)
    async with running(QWEN2, tensor_parallel=2, enforce_eager=True) as served:
        fault.append(lambda: threading.Event().wait(float(draw.uniform(0, 0.004))))
        many = await asyncio.gather(*(answer(served, greedy(number)) for number in range(len(PROMPTS))))
        assert many == [[expected(number)] for number in range(len(PROMPTS))]


@torch.inference_mode()
def test_an_exchange_that_only_some_ranks_take_ends_in_bounded_time(monkeypatch):
    monkeypatch.setattr(engine.parallel.host, "PATIENCE", 0.1)
    model = split(tiny.checkpoint("qwen2"), 2)
    monkeypatch.setattr(model.members[1], "exchange", Alone())
    parts = harness(model)
    with pytest.raises(threading.BrokenBarrierError):
        parts.prefill(parts.add(tokens(8)))
    model.close()


class Alone:
    """The link of a rank that waits for no other rank."""

    def total(self, partial):
        return partial

    def add_to(self, residual, partial):
        residual += partial

    def add_then(self, residual, partial, norm):
        self.add_to(residual, partial)
        return Normed(norm, residual)


@torch.inference_mode()
def test_a_bias_on_every_rank_is_found(monkeypatch):
    monkeypatch.setattr(engine.parallel.pieces, "is_summed", lambda place: False)
    model, whole = split(tiny.checkpoint("gpt2"), 2), Harness(load(tiny.checkpoint("gpt2")))
    parts, given = harness(model), tokens(20)
    got, want = (each.prefill(each.add(given)).log_softmax(-1) for each in (parts, whole))
    assert (got - want).abs().max() > 10 * LIMIT
    model.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_of_a_thread_on_one_rank_ends_the_work_of_all(rank):
    group = engine.parallel.host.HostGroup(2)

    def work(number):
        if number == rank:
            raise SystemExit
        return group.links[number].gather(torch.zeros(1, 1), 0)

    with pytest.raises(SystemExit):
        group.run(work)
    assert [len(each.T) for each in group.run(lambda number: group.links[number].gather(torch.zeros(1, 1), 0))] == [
        2,
        1,
    ]
    group.close()
