"""What a request may ask for, on ranks: a grammar, the experts of its tokens; numbers of ranks that divide no width."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.config import RanksConfig
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.kit import harness, split
from tests.engine.parallel.test_split_models import LIMIT, in_full, tokens
from tests.engine.stand_in_accelerator import StandInAccelerator
from tests.engine.test_grammar_rows import FOLDER, JSON, OPEN, PROMPTS, WORD, asked
from tests.engine_kit import answer, answer_deltas, running, text_request
from tests.models.harness import Harness, load
from tests.models.test_decoders import greedy


@pytest.fixture(params=["host", "device", "steady"])
def opened(request, monkeypatch):
    """The accelerators of the engine that is started next; empty on a host."""
    opened = []

    def open_accelerator(_device):
        opened.append(HostAccelerator() if request.param == "device" else StandInAccelerator(next(iter(opened), None)))
        return opened[-1]

    if request.param != "host":
        monkeypatch.setattr(engine.run.start, "open_accelerator", open_accelerator)
    return opened


async def test_answers_under_a_grammar_are_those_of_one_rank(opened):
    grammars, found = (JSON, WORD, OPEN, None), []
    for ranks in (1, 2):
        opened.clear()
        async with running(FOLDER, tensor_parallel=ranks) as served:
            rules = [(grammars[number % 4], 1 + number % 2) for number in range(len(PROMPTS))]
            requests = [asked(ids, each, 24, logprobs=most) for ids, (each, most) in zip(PROMPTS, rules)]
            found.append(await asyncio.gather(*(answer(served, request) for request in requests)))
    assert found[0] == found[1]


@pytest.mark.parametrize("whole", [False, True])
async def test_the_experts_of_tokens_are_those_of_one_rank(whole):
    found = []
    for ranks in (1, 2):
        settings = {"tensor_parallel": ranks, "return_routed_experts": True, "ranks": RanksConfig(whole and ranks > 1)}
        async with running(tiny.checkpoint("qwen3_moe"), **settings) as served:
            asks = text_request(range(5, 40), 9, return_routed_experts=True)
            ((*_, last),) = await answer_deltas(served, asks)
            found.append(last.routed_experts)
    assert len(found[0]) == 35 + 9
    assert np.array_equal(*found)


async def test_experts_of_all_tokens_are_noted_where_few_are_sampled(monkeypatch):
    """The last layer then computes all tokens, on every rank."""
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    asks, found = text_request(range(5, 40), 3, return_routed_experts=True), []
    for ranks in (1, 2):
        settings = {"tensor_parallel": ranks, "return_routed_experts": True, "max_num_seqs": 2}
        async with running(tiny.checkpoint("qwen3_moe"), **settings) as served:
            ((*_, last),) = await answer_deltas(served, asks)
            found.append(last.routed_experts)
    assert len(found[0]) == 35 + 3
    assert np.array_equal(*found)


async def test_eight_ranks_give_the_tokens_of_transformers():
    prompts = [list(range(9, 9 + length)) for length in (3, 17, 40)]
    async with running(tiny.checkpoint("glm4"), tensor_parallel=8, max_prefill_chunk=7) as served:
        got = await asyncio.gather(*(answer(served, text_request(ids, 12, ignore_eos=True)) for ids in prompts))
    assert [each[0] for each in got] == [greedy("glm4", ids, 12) for ids in prompts]


KINDS = {
    "norms over projections": partial(tiny.causal, "Olmo2ForCausalLM", "Olmo2Config", hidden_size=105),
    "sinks": partial(tiny.causal, "GptOssForCausalLM", "GptOssConfig", num_local_experts=9, num_experts_per_tok=2),
    "experts": partial(
        tiny.causal,
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
}


@pytest.mark.parametrize("ranks", [3, in_full(5), in_full(6), 7])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_numbers_of_ranks_that_divide_no_width(kind, ranks, tmp_path):
    """One KV head that every rank has, and as many as ranks; a part of each expert, and whole experts."""
    for keys in (1, ranks):
        made = KINDS[kind](
            num_attention_heads=ranks, num_key_value_heads=keys, head_dim=16, num_hidden_layers=2, intermediate_size=100
        )
        folder, given = tiny.save(made(), tmp_path / str(keys)), tokens(20)
        whole = Harness(load(folder))
        want = whole.prefill(whole.add(given), 16).log_softmax(-1)
        for experts in (False, True) if kind != "norms over projections" else (False,):
            model = split(folder, ranks, whole_experts=experts)
            parts = harness(model)
            got = parts.prefill(parts.add(given), 16).log_softmax(-1)
            model.close()
            assert (got - want).abs().max() <= LIMIT
