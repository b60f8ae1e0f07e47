"""An engine on simulated ranks: tokens and log-probabilities of one rank, in every circumstance; faults; the end."""

import asyncio
import functools
import logging
import re
import threading
from dataclasses import replace

import pytest
import torch

import engine.run.start
from engine import Engine, EngineConfig, FinishReason
from engine.base.config import LoraConfig
from engine.base.errors import ConfigError
from engine.base.trace import RANKS
from engine.device.cards import Card, check_cards, detour_line
from engine.parallel.group import Group
from engine.weights.load import weight_bytes
from server.ops.rank_metrics import rank_families
from tests import tiny
from tests.engine_kit import SMALL, answer, answer_deltas, prompts, running, text_request

QWEN2 = tiny.checkpoint("qwen2")
PROMPTS = prompts(6, tiny.FIRST_SPECIAL, seed=3, longest=60)
LENGTH = 20


@functools.cache
def oracle():
    return tiny.reference(QWEN2)


@functools.cache
@torch.inference_mode()
def expected(number):
    """Greedy tokens of transformers."""
    ids = torch.as_tensor(PROMPTS[number], dtype=torch.long)[None]
    made = oracle().generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return made[0, ids.shape[1] :].tolist()


def greedy(number, **more):
    return text_request(PROMPTS[number], LENGTH, ignore_eos=True, **more)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (4, {"max_num_batched_tokens": 40, "max_prefill_chunk": 7}),
        (2, {"num_gpu_blocks_override": 10, "max_model_len": 96, "debug_poison": True}),
    ],
    ids=["batched", "chunks on 4 ranks", "preempted"],
)
async def test_greedy_tokens_equal_transformers(ranks, settings):
    async with running(QWEN2, tensor_parallel=ranks, **settings) as engine:
        for _ in range(2):  # the second time from the prefix cache
            got = await asyncio.gather(*(answer(engine, greedy(number)) for number in range(len(PROMPTS))))
            assert [each[0] for each in got] == [expected(number) for number in range(len(PROMPTS))]
        short = "num_gpu_blocks_override" in settings
        assert (engine.stats.preemptions > 0, engine.stats.prefix_hits > 0) == (short, not short)
        assert await answer(engine, text_request(PROMPTS[0], LENGTH, n=3, ignore_eos=True)) == [expected(0)] * 3


async def test_log_probabilities_are_those_of_one_rank():
    found = []
    for ranks in (1, 2, 4):
        async with running(QWEN2, tensor_parallel=ranks) as engine:
            (deltas,) = await answer_deltas(engine, greedy(1, logprobs=3, prompt_logprobs=2))
            prompt = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
            own = [entry for delta in deltas for entry in delta.logprobs or ()]
            found.append([*prompt[1:], *own])
    for other in found[1:]:
        assert len(other) == len(found[0]) == len(PROMPTS[1]) - 1 + LENGTH
        for one, two in zip(found[0], other):
            assert one.token_id == two.token_id
            assert abs(one.logprob - two.logprob) <= 1e-4


async def test_weights_that_are_quantised_while_they_are_read_are_those_of_one_rank():
    found = []
    for ranks in (1, 2):
        async with running(QWEN2, tensor_parallel=ranks, quantization="fp8") as engine:
            found.append(await answer(engine, greedy(3)))
    assert found[0] == found[1]


async def test_seeded_draws_are_those_of_one_rank():
    rules = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    found = []
    for ranks in (1, 4):
        async with running(QWEN2, tensor_parallel=ranks) as engine:
            found.append(await answer(engine, greedy(2, **rules)))
    assert found[0] == found[1]


async def test_a_rank_that_fails_ends_the_step_and_the_next_request_is_answered(monkeypatch):
    failing = threading.Event()
    real = Group._run

    def run(self, rank, work, done):
        def failed(number):
            raise ValueError("rank 1 has failed")

        real(self, rank, failed if rank == 1 and failing.is_set() else work, done)

    monkeypatch.setattr(Group, "_run", run)
    async with running(QWEN2, tensor_parallel=2) as engine:
        failing.set()
        async with engine.submit(greedy(0)) as stream:
            ends = [delta.finish_reason async for delta in stream]
        assert ends[-1] is FinishReason.ERROR
        failing.clear()
        assert await answer(engine, greedy(0)) == [expected(0)]


async def test_a_profile_has_the_work_of_each_rank():
    async with running(QWEN2, tensor_parallel=4) as engine:
        assert await engine.start_profile()
        await answer(engine, greedy(0))
        spans = await engine.stop_profile()
        assert {span.track - RANKS for span in spans} == {0, 1, 2, 3}
        assert len(spans) >= 4 * LENGTH
        assert all(span.begun <= span.ended for span in spans)
        assert await engine.stop_profile() == []


async def test_every_rank_reports_what_it_holds():
    async with running(QWEN2, tensor_parallel=2) as engine:
        one, other = engine.limits.of_ranks
        assert one.kv_cache == other.kv_cache > 0
        assert one.exchange == other.exchange == 0  # simulated ranks share memory
        whole = weight_bytes(engine.inspect().runtime.model.whole)
        assert whole / 2 <= one.weights < whole
    (gauge,) = rank_families((one, other), "m")
    assert {(sample.labels["rank"], sample.labels["kind"]): sample.value for sample in gauge.samples} == {
        (rank, kind): value for rank, held in (("0", one), ("1", other)) for kind, value in held._asdict().items()
    }


async def test_the_ranks_threads_end_with_the_engine(caplog):
    with caplog.at_level(logging.INFO, "omniloop.engine"):
        async with running(QWEN2, tensor_parallel=4):
            assert sum(each.name.startswith("omniloop-rank") for each in threading.enumerate()) == 3
    assert not any(each.name.startswith("omniloop-rank") for each in threading.enumerate())
    assert "4 ranks are simulated on the CPU, for tests" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel": 3}, "4 heads and 2 key-value heads cannot be dealt out so; possible: 1, 2, 4"),
        ({"tensor_parallel": 9}, "at most 8 ranks"),
        ({"tensor_parallel": 2, "lora": LoraConfig()}, "--enable-lora is not served on several ranks yet"),
        ({"tensor_parallel": 2, "model_impl": "transformers"}, "transformers' modules"),
    ],
)
async def test_what_does_not_run_is_refused_at_the_start(settings, said):
    engine = Engine(EngineConfig(model=str(QWEN2), **SMALL, **settings))
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {settings['tensor_parallel']}: .*{said}"):
        await engine.start()


CARD = Card("H200", 100 << 30)


@pytest.mark.parametrize(
    ("cards", "variables", "said"),
    [
        ([CARD], {}, "this process sees 1 GPUs; possible: 1 to 1"),
        ([CARD, replace(CARD, name="H100")], {}, r"different kinds \(H200, H100\)"),
        ([CARD, replace(CARD, free=89 << 30)], {}, "GPU 1 has 89.00 GiB free, another 100.00 GiB"),
        ([CARD, CARD], {"CUDA_LAUNCH_BLOCKING": "1"}, "with CUDA_LAUNCH_BLOCKING=1 a launch waits"),
        (
            [CARD, CARD],
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"},
            "PYTORCH_CUDA_ALLOC_CONF has expand",
        ),
    ],
)
def test_cards_that_cannot_work_together_are_refused(cards, variables, said):
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size 2: .*{said}"):
        check_cards(2, cards, variables)


def test_cards_that_cannot_address_each_other_s_memory():
    cards = [replace(CARD, unreached=(1,)), CARD]
    check_cards(2, cards, {})
    assert re.match("GPU 0 cannot address the memory of GPU 1: .* about 10 us instead of 2, .* bus", detour_line(cards))
    assert not detour_line([CARD, CARD])
    with pytest.raises(ConfigError, match="--require-peer-access: GPU 0 cannot address the memory of GPU 1; choose"):
        check_cards(2, cards, {}, require_peer_access=True)


def test_cards_that_work_together():
    check_cards(2, [CARD, replace(CARD, free=91 << 30)], {"CUDA_LAUNCH_BLOCKING": "0"})
    check_cards(2, [CARD, CARD], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})


async def test_cards_are_checked_before_they_are_opened(monkeypatch):
    monkeypatch.setattr(engine.run.start, "choose_device", lambda _asked: "cuda:0")
    monkeypatch.setattr(engine.run.start, "cards_of", lambda ranks: [CARD])
    with pytest.raises(ConfigError, match="this process sees 1 GPUs"):
        await Engine(EngineConfig(model=str(QWEN2), **SMALL, tensor_parallel=2)).start()
