"""A busy engine returns transformers' tokens and log-probabilities for families with states.

Rows are mixed, computed in chunks, alone, and found in the prefix cache; tests/invariance has further conditions.
"""

import asyncio

import pytest
import torch

import engine.run.start
from tests import tiny, tiny_states
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, answer_deltas, running, text_request
from tests.invariance.test_seeing import TOKENS, request
from tests.models.seeing import oracle
from tests.models.test_decoders import prompt
from tests.models.test_hybrids import greedy
from tests.models.test_qwen_vl import oracle_inputs

TOLERANCE = 2e-4
PROMPTS = [prompt(length, seed=9) for length in (60, 23, 40)]
ROOM = {"max_model_len": 80, "max_prefill_chunk": 11}


def wanted(name):
    """Transformers' greedy tokens of each prompt, with the log-probability of each token."""
    found = []
    for tokens in PROMPTS:
        made = greedy(name, tokens, TOKENS)
        with torch.inference_mode():
            logits = oracle(name)(input_ids=torch.tensor([[*tokens, *made[:-1]]])).logits[0, len(tokens) - 1 :]
        found.append((made, logits.float().log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0]))
    return found


async def check(name, **settings):
    want, asked = (
        await asyncio.to_thread(wanted, name),
        [text_request(each, TOKENS, ignore_eos=True, logprobs=0) for each in PROMPTS],
    )
    async with running(tiny.checkpoint(name), dtype="float32", **{**ROOM, **settings}) as served:
        for _ in range(2):
            together = await asyncio.gather(*[answer_deltas(served, each) for each in asked])
            for (deltas,), (tokens, scores) in zip(together, want, strict=True):
                got = [entry.logprob for delta in deltas for entry in delta.logprobs]
                assert [token for delta in deltas for token in delta.token_ids] == tokens
                assert (torch.tensor(got) - scores).abs().max() <= TOLERANCE
        assert (await answer(served, asked[0]))[0] == want[0][0]
        assert served.stats.prefix_hits > 0


@pytest.mark.parametrize("name", tiny_states.STATES)
async def test_tokens_and_log_probabilities_equal_transformers(name):
    await check(name)


@pytest.mark.parametrize("name", ["nemotron_h-states", "jamba-states", "falcon_h1"])
async def test_so_do_those_of_an_accelerators_steps(name, monkeypatch):
    """Padded steps and recorded graphs, on CPU tensors; a fold has 16 positions."""
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    await check(name)


def seen(name, mix):
    """Transformers' greedy tokens after images and videos."""
    model, inputs = oracle(name), oracle_inputs(name, mix)
    model.generation_config.eos_token_id = model.model.rope_deltas = None
    made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return made[0, inputs["input_ids"].shape[1] :].tolist()


async def check_seen(name, mixes=("picture", "large picture", "picture, film, picture"), **settings):
    want = [await asyncio.to_thread(seen, name, mix) for mix in mixes]
    async with running(tiny.checkpoint(name), dtype="float32", max_prefill_chunk=13, **settings) as served:
        for _ in range(2):
            got = await asyncio.gather(*[answer(served, request(name, mix)) for mix in mixes])
            assert [choices[0] for choices in got] == want
        assert served.stats.prefix_hits > 0


@pytest.mark.parametrize("name", tiny_states.SEEING)
async def test_tokens_behind_pictures_and_films_equal_transformers(name):
    await check_seen(name)
