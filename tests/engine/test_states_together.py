"""Models with states together with other features: grammars with jumps, prompts' log-probabilities, faults."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.base.config import StateConfig
from engine.base.errors import ConfigError, InvalidLogitsError
from tests import tiny
from tests.engine.test_grammar_rows import PROMPTS, asked, everywhere, path
from tests.engine.test_jump_forward import HELD
from tests.engine_kit import answer, answer_deltas, quiet, running, text_request

__all__ = ["path"]
FOLDER = tiny.checkpoint("qwen3_5_text-states")
ROOM = {"num_gpu_blocks_override": 3000, "max_model_len": 256}


@everywhere
async def test_a_state_behind_jumps_is_that_of_the_tokens(path):
    """A jump computes a position twice; a state that is updated in place would fold the position twice."""
    async with running(FOLDER, jump_forward=True, **ROOM) as engine:
        requests = [asked(prompt, HELD, logprobs=0) for prompt in PROMPTS[:4]]
        answers = await asyncio.gather(*[answer_deltas(engine, request) for request in requests])
        assert (await quiet(engine))["matchers"] == 0
    async with running(FOLDER, enable_prefix_caching=False, **ROOM) as engine:
        for prompt, (deltas,) in zip(PROMPTS, answers):
            tokens = [token for delta in deltas for token in delta.token_ids]
            whole = text_request([*prompt.tolist(), *tokens], 1, prompt_logprobs=0)
            wanted = (await answer_deltas(engine, whole))[0][0].prompt_logprobs[len(prompt) :]
            got = [entry for delta in deltas for entry in delta.logprobs]
            assert len(got) == len(tokens) > 10
            assert max(abs(one.logprob - other.logprob) for one, other in zip(got, wanted)) < 1e-4


@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7}])
async def test_log_probabilities_of_prompts_are_those_of_one_step(settings):
    request = text_request(PROMPTS[1], 4, prompt_logprobs=2)
    found = []
    for chosen in ({"enable_prefix_caching": False}, settings):
        async with running(FOLDER, **ROOM, **chosen) as engine:
            for _ in range(2):
                found.append((await answer_deltas(engine, request))[0][0].prompt_logprobs)
    assert len(found[0]) == len(PROMPTS[1])
    assert all(each == found[0] for each in found)


async def test_a_state_that_is_no_number_ends_its_row_alone_and_is_never_found():
    """The token `bad` has a NaN embedding and lies within a prompt that other requests share."""
    bad, shared = 3, np.arange(10, 60, dtype=np.int32)
    broken = np.concatenate([shared, [bad], shared]).astype(np.int32)
    whole = np.concatenate([shared, shared[::-1]]).astype(np.int32)
    async with running(FOLDER, **ROOM) as engine:
        wanted = await answer(engine, text_request(whole, 12, ignore_eos=True))
    async with running(FOLDER, **ROOM, max_prefill_chunk=16) as engine:

        def spoil(runtime) -> None:
            runtime.model.embed.table[bad] = float("nan")

        await engine.on_device(spoil)

        async def fails() -> None:
            async with engine.submit(text_request(broken, 12)) as stream:
                last = [delta async for delta in stream][-1]
            assert isinstance(last.error, InvalidLogitsError)

        neighbour, _ = await asyncio.gather(answer(engine, text_request(whole, 12, ignore_eos=True)), fails())
        assert neighbour == wanted
        await quiet(engine)
        named = engine.stats.states.named
        await fails()
        await quiet(engine)
        assert engine.stats.states.named == named, "nothing of the row is named"
        assert await answer(engine, text_request(whole, 12, ignore_eos=True)) == wanted


REFUSED = (
    ("qwen3", {"states": StateConfig(mode="all")}, "--mamba-cache-mode all: no layer of this model has a state"),
    ("qwen3", {"states": StateConfig(dtype="float32")}, "--mamba-ssm-cache-dtype float32: no layer"),
    ("qwen3_5_text-states", {"num_gpu_blocks_override": 20}, "two states of"),
    ("qwen3_5_text-states", {"block_size": 64}, "of the blocks of a row's states would be padding"),
)


@pytest.mark.parametrize(("name", "settings", "why"), REFUSED)
async def test_what_cannot_be_served_is_refused_at_start(name, settings, why):
    with pytest.raises(ConfigError) as caught:
        async with running(tiny.checkpoint(name), **settings):
            pass
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_states_in_bfloat16_are_half_as_large_and_nearly_the_same():
    found = []
    for dtype in ("float32", "bfloat16"):
        async with running(FOLDER, states=StateConfig(dtype=dtype), **ROOM) as engine:
            sizes = await engine.on_device(lambda runtime: runtime.layout.runs.state_bytes)
            request = text_request(PROMPTS[2], 8, logprobs=1, ignore_eos=True)
            deltas = (await answer_deltas(engine, request))[0]
            found.append((sizes, torch.tensor([each.logprob for delta in deltas for each in delta.logprobs])))
    (large, exact), (small, near) = found
    assert small < 0.6 * large
    assert 0 < (exact[:3] - near[:3]).abs().max() < 0.05


async def test_salts_and_choices_keep_states_apart():
    request = text_request(PROMPTS[3][:50], 6, n=2, ignore_eos=True)
    async with running(FOLDER, **ROOM) as engine:
        first = await answer_deltas(engine, replace(request, cache_salt=b"a"))
        other = await answer_deltas(engine, replace(request, cache_salt=b"b"))
        again = await answer_deltas(engine, replace(request, cache_salt=b"a"))
        assert [deltas[0][0].cached_tokens for deltas in (first, other)] == [0, 0]
        assert again[0][0].cached_tokens > 0
