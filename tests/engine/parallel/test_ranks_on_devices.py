"""Ranks on the device path give one rank's tokens: graphs and eager steps, the real launcher and the GIL-free loop."""

import asyncio

import pytest

import engine.run.start
from engine import Engine, EngineConfig, FinishReason
from engine.base.errors import DeviceLostError
from engine.step.backend.device.forwards import RankForward
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.test_running import LENGTH, PROMPTS, QWEN2, expected, greedy
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_prompt_rows import IDS, embeddings, of_rows
from tests.engine_kit import SMALL, answer, answer_deltas, running, text_request


@pytest.fixture
def on_host_accelerators(monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())


@pytest.fixture
def stand_ins(monkeypatch):
    opened = []

    def open_accelerator(_device):
        opened.append(StandInAccelerator(opened[0] if opened else None))
        return opened[-1]

    monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    return opened


async def all_at_once(engine):
    return [each[0] for each in await asyncio.gather(*(answer(engine, greedy(n)) for n in range(len(PROMPTS))))]


WANTED = range(len(PROMPTS))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (4, {"max_num_batched_tokens": 40, "max_prefill_chunk": 7}),
        (2, {"enforce_eager": True}),
        (2, {"num_gpu_blocks_override": 10, "max_model_len": 96, "debug_poison": True}),
    ],
    ids=["graphs", "chunks on 4 ranks", "eager", "preempted"],
)
async def test_greedy_tokens_equal_transformers(on_host_accelerators, ranks, settings):
    async with running(QWEN2, tensor_parallel=ranks, **settings) as engine:
        assert await all_at_once(engine) == [expected(number) for number in WANTED]
        counts = engine.inspect().runtime.executor.backend.launcher.counts
        assert (counts["step"] > 0) != settings.get("enforce_eager", False)
        assert await answer(engine, text_request(PROMPTS[0], LENGTH, n=3, ignore_eos=True)) == [expected(0)] * 3


@pytest.mark.parametrize("ranks", [2, 4])
async def test_the_steady_loop_launches_every_rank(stand_ins, ranks):
    async with running(QWEN2, tensor_parallel=ranks) as engine:
        assert await all_at_once(engine) == [expected(number) for number in WANTED]
        assert engine.inspect().runtime.executor.backend.can.steady_loop
    assert len(stand_ins) == ranks
    assert [each.errors for each in stand_ins] == [[]] * ranks


SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5, "logit_bias": ((7, 2.0),)}


async def special_answers(ranks):
    """Tokens and log-probabilities of rows that make steps special: every token's hidden state, rules, masks."""
    async with running(QWEN2, tensor_parallel=ranks) as engine:
        (deltas,) = await answer_deltas(engine, greedy(1, logprobs=3, prompt_logprobs=2))
        prompt = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
        own = [entry for delta in deltas for entry in delta.logprobs or ()]
        masked = await answer(engine, greedy(0, bad_words=((7, 8),), logprobs=2, logprob_token_ids=(3,)))
        return [*prompt[1:], *own], await answer(engine, greedy(2, **SEEDED)), masked


async def test_special_rows_are_those_of_one_rank(on_host_accelerators):
    logprobs, *tokens = await special_answers(1)
    others, *equal = await special_answers(2)
    assert equal == tokens
    for one, two in zip(logprobs, others, strict=True):
        assert one.token_id == two.token_id
        assert abs(one.logprob - two.logprob) <= 1e-4


@pytest.mark.parametrize("eager", [False, True])
async def test_rows_of_media_reach_every_rank(on_host_accelerators, eager):
    table = embeddings("qwen3")
    settings = {"encoder_cache_tokens": 64, "enforce_eager": eager, "max_prefill_chunk": 16}
    async with running(tiny.checkpoint("qwen3"), tensor_parallel=2, enable_prompt_embeds=True, **settings) as engine:
        wanted = await answer(engine, text_request(IDS, 8))
        assert await answer(engine, of_rows(table, 7, 30)) == wanted
    async with running(tiny.checkpoint("qwen3")) as engine:
        assert await answer(engine, text_request(IDS, 8)) == wanted


@pytest.mark.parametrize("name", ["olmo2", "mixtral"])
async def test_other_exchanges_and_experts(on_host_accelerators, name):
    found = []
    for ranks in (1, 2):
        async with running(tiny.checkpoint(name), tensor_parallel=ranks) as engine:
            found.append(await all_at_once(engine))
    assert found[0] == found[1]


async def test_every_rank_has_its_own_memory_and_the_same_blocks(on_host_accelerators):
    async with running(QWEN2, tensor_parallel=2) as engine:
        first, second = engine.inspect().runtime.executor.ranks
        assert first.num_blocks == second.num_blocks
        assert first.own is not second.own
        pairs = zip(first.caches, second.caches, strict=True)
        assert all(one[0].data_ptr() != other[0].data_ptr() for one, other in pairs)


async def test_a_rank_that_raises_ends_the_step_for_all(on_host_accelerators, monkeypatch):
    failing = []
    eager = RankForward.eager

    def fails(self, *args):
        if failing and self.rank.number == 1:
            raise ValueError("rank 1 has failed")
        return eager(self, *args)

    monkeypatch.setattr(RankForward, "eager", fails)
    async with running(QWEN2, tensor_parallel=2, enforce_eager=True) as engine:
        failing.append(True)
        async with engine.submit(greedy(0)) as stream:
            ends = [delta.finish_reason async for delta in stream]
        assert ends[-1] is FinishReason.ERROR
        failing.clear()
        assert await answer(engine, greedy(0)) == [expected(0)]


async def test_a_rank_that_has_waited_in_vain_is_a_lost_device(stand_ins, caplog):
    served, deaths = Engine(EngineConfig(model=str(QWEN2), **SMALL, tensor_parallel=2)), []
    await served.start()
    served.on_death = deaths.append
    error = served.inspect().runtime.model.group.error.numpy()
    async with served.submit(text_request(PROMPTS[0], 200, ignore_eos=True)) as stream:
        found = []
        async for delta in stream:
            found.append(delta)
            error[0] = 1
    last = found[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, DeviceLostError)
    assert deaths
    assert served.state == "dead"
    await served.stop(1)
