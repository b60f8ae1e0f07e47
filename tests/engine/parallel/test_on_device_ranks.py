"""Ranks on real GPUs give one rank's tokens: all ranks as streams of one card, and a card for each rank.

Several ranks on one card exist in this file alone. Their exchanges use few programs, so that a rank's kernels find room
while the other rank waits; kernels do not overlap, because a kernel that starts early would take that room; and each
stream has its own counters of split products.
"""

import asyncio
import functools
import sys

import numpy as np
import pytest
import torch

import engine.run.built
import engine.run.start
from engine.kernels import pdl
from engine.kernels.gemm import split_k
from engine.kernels.state import ssd_step
from engine.parallel.device import DeviceGroup
from tests import drafters, tiny
from tests.engine import test_dflash, test_drafter
from tests.engine.circumstances import drawn, same_in_every_circumstance
from tests.engine.parallel.test_pooled_ranks import BODIES, DECODERS
from tests.engine.parallel.test_running import LENGTH, PROMPTS
from tests.engine.test_drafts import ngram
from tests.engine.test_pooling_steps import INPUTS, arrays
from tests.engine.test_prompt_rows import IDS, embeddings, of_rows
from tests.engine_kit import answer, answer_deltas, running, text_request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
PROGRAMS = 12
SETTINGS = {"device": "cuda", "dtype": "float32", "num_gpu_blocks_override": 200, "max_model_len": 256}
STATES = (
    "qwen3_5_text-states",
    "bamba-states",
    "jamba-states",
)  # exchanges inside a layer: none, sums of squares, rows
BLOCK_SIZES = {"bamba-states": 16}  # blocks that states of half the heads fill


def per_stream(function):
    """A cached function of a device, its last argument, with results for each stream."""
    found = functools.cache(lambda _stream, *given: function.__wrapped__(*given))
    return lambda *given: found(torch.cuda.current_stream(given[-1]).cuda_stream, *given)


@pytest.fixture(params=["one card", "a card for each rank"])
def cards(request, monkeypatch):
    if request.param != "one card":
        if torch.cuda.device_count() < 2:
            pytest.skip("one card")
        yield
        return
    from engine.device.accelerator import Accelerator

    if "enforce_eager" in request.node.callspec.params.get("settings", {}):
        pytest.skip("a kernel that an eager step loads waits for the other rank's exchange, which waits for this rank")
    for source in (split_k, ssd_step):  # counters that the launches of one stream share
        arrivals = source.arrivals
        for module in list(sys.modules.values()):
            if getattr(module, "arrivals", None) is arrivals:
                monkeypatch.setattr(module, "arrivals", per_stream(arrivals))
    monkeypatch.setattr(pdl, "overlaps", lambda: False)
    pdl.launch_options.cache_clear()
    open_one = engine.run.start.open_accelerator
    monkeypatch.setattr(
        engine.run.start,
        "open_accelerator",
        lambda device: Accelerator("cuda:0") if device.startswith("cuda") else open_one(device),
    )
    monkeypatch.setattr(engine.run.start, "check_cards", lambda *_: None)
    monkeypatch.setattr(engine.run.built, "DeviceGroup", functools.partial(DeviceGroup, programs=PROGRAMS))
    yield
    pdl.launch_options.cache_clear()


def greedy(number, **more):
    return text_request(PROMPTS[number], LENGTH, ignore_eos=True, **more)


async def answers(name, ranks, **settings):
    """Greedy tokens of all prompts together, then alone; then seeded draws, and tokens under rules."""
    if name in STATES:
        settings = {"num_gpu_blocks_override": 2000, "block_size": BLOCK_SIZES.get(name, 8), **settings}
    settings = {**SETTINGS, **settings}
    async with running(tiny.checkpoint(name), tensor_parallel=ranks, **settings) as engine:
        together = await asyncio.gather(*(answer(engine, greedy(n)) for n in range(len(PROMPTS))))
        alone = [await answer(engine, greedy(n)) for n in range(len(PROMPTS))]
        seeded = await answer(engine, greedy(2, temperature=1.0, top_p=0.9, seed=5))
        ruled = await answer(engine, greedy(0, bad_words=((7, 8),), logprobs=2, presence_penalty=0.5))
        return together, alone, seeded, ruled


@functools.cache
def of_one_rank(name):
    return asyncio.run(answers(name, 1))


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["qwen2", "olmo2", "mixtral", *STATES])
def test_tokens_are_those_of_one_rank(cards, name, settings):
    got, want = asyncio.run(answers(name, 2, **settings)), of_one_rank(name)
    found = [a == b for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]))]
    assert sum(found) >= len(found) - 1  # sums in another order may change the nearest choice
    assert got[0] == got[1]


DRAFTS = {  # the drafters are trained when a test wants them
    "ngram": lambda: ngram(4),
    "eagle3": lambda: test_drafter.asked(3),
    "dflash": lambda: test_dflash.asked(5),
}


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", DRAFTS)
def test_drafts_are_verified_on_all_ranks(cards, method, settings):
    """The answers of one rank without drafts; texts that drafts know, and six more together."""

    async def drafted(ranks, **more):
        async with running(tiny.checkpoint("qwen3"), tensor_parallel=ranks, **SETTINGS, **more) as engine:
            known = [text_request(drafters.PROMPTS[n], 30, ignore_eos=True) for n in range(2)]
            found = [await answer(engine, each) for each in known]
            found += await asyncio.gather(*(answer(engine, greedy(n)) for n in range(len(PROMPTS))))
            biased = await answer(engine, greedy(0, logit_bias=((7, 100.0),)))
            return found, biased, engine.stats.drafts

    want, _, _ = asyncio.run(drafted(1))
    got, biased, counts = asyncio.run(drafted(2, speculative=DRAFTS[method](), **settings))
    assert sum(a == b for a, b in zip(got, want)) >= len(want) - 1  # as above
    assert biased == [[7] * LENGTH]
    assert 0 < counts.accepted_tokens <= counts.draft_tokens


async def test_log_probabilities_and_rows_of_media(cards):
    found = []
    for ranks in (1, 2):
        async with running(
            tiny.checkpoint("qwen3"), tensor_parallel=ranks, enable_prompt_embeds=True, **SETTINGS
        ) as it:
            (deltas,) = await answer_deltas(it, text_request(IDS, 8, prompt_logprobs=2, logprobs=2))
            prompt = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)[1:]
            own = [entry for delta in deltas for entry in delta.logprobs or ()]
            rows = await answer(it, of_rows(embeddings("qwen3"), 7, 30))
            assert rows == [[token for delta in deltas for token in delta.token_ids]]
            found.append([*prompt, *own])
    for one, two in zip(*found, strict=True):
        assert abs(one.logprob - two.logprob) <= 1e-3


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["last token", "mean and dense", "bert", "modernbert", "deberta-v1", "nomic moe"])
async def test_pooled_arrays_are_those_of_the_host(cards, name, settings):
    folder, rows = BODIES[name](), {"max_num_seqs": 16, "num_gpu_blocks_override": 200 * (name in DECODERS)}
    for per_token in (False, True):
        async with running(folder, device="cpu", **rows) as it:
            wanted = await arrays(it, INPUTS, per_token)
        asked = {**rows, **settings, "dtype": "float32", "tensor_parallel": 2}
        async with running(folder, device="cuda", max_num_batched_tokens=256, **asked) as it:
            for one, other in zip(await arrays(it, INPUTS, per_token), wanted, strict=True):
                lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
                assert ((one * other).sum(-1) / lengths).min() >= 1 - 1e-5


@pytest.mark.parametrize("name", ["stablelm-parallel", "gemma4"])
async def test_layers_with_terms_that_all_ranks_have(cards, name):
    found = []
    for ranks in (1, 2):
        async with running(tiny.checkpoint(name), tensor_parallel=ranks, **SETTINGS) as it:
            (deltas,) = await answer_deltas(it, text_request(PROMPTS[1], 8, logprobs=1, prompt_logprobs=0))
            found.append(next(each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None)[1:])
    for one, two in zip(*found, strict=True):
        assert abs(one.logprob - two.logprob) <= 1e-3


async def test_not_a_bit_depends_on_other_requests(cards):
    tight = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 22, "max_num_seqs": 16, "max_model_len": 128}
    settings = {**SETTINGS, **tight, "deterministic": True}
    async with running(tiny.checkpoint("qwen2"), tensor_parallel=2, **settings) as it:
        watched = drawn(3, tiny.FIRST_SPECIAL, (20, 60), 8, seed=1, logprobs=2)
        await same_in_every_circumstance(it, watched, drawn(12, tiny.FIRST_SPECIAL, (1, 40), 20, seed=2))
