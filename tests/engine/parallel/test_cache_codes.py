"""Caches of 8 bits on ranks: each rank's heads have their scales, and log-probabilities are those of one rank."""

import pytest
import torch

import engine.run.start
from engine.cache.spec import KeyValueSpec
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.test_running import PROMPTS
from tests.engine_kit import answer_deltas, running, text_request
from tests.quant.test_kv_cache import with_scales

LIMIT = 1e-4


def of_heads(factor):
    """Scales of three layers with two KV heads."""
    kinds = (("k", 0.004), ("v", 0.002))
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([scale, factor * scale]) * (layer + 1)
        for layer in range(3)
        for kind, scale in kinds
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    scaled = with_scales(tmp_path_factory.mktemp("scaled"), of_heads(9.0))
    return {"without": tiny.checkpoint("llama"), "scales of heads": scaled}


async def logprobs(folder, ranks, word, **settings):
    """Of a prompt in chunks, read again from the codes of its first tokens, and of an answer."""
    async with running(folder, tensor_parallel=ranks, kv_cache_dtype=word, max_prefill_chunk=7, **settings) as it:
        (deltas,) = await answer_deltas(it, text_request(PROMPTS[1], 12, prompt_logprobs=1, logprobs=1))
        prompt = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)[1:]
        entries = [*prompt, *(entry for delta in deltas for entry in delta.logprobs or ())]
        return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("without", "fp8"),
        ("without", "fp8_e5m2"),
        ("scales of heads", "fp8"),
        ("scales of heads", "fp8_per_token_head"),
    ],
)
async def test_log_probabilities_are_those_of_one_rank(folders, source, word):
    want = await logprobs(folders[source], 1, word)
    for ranks in (2, 4):  # of 4 ranks two have each KV head
        got = await logprobs(folders[source], ranks, word)
        assert (got - want).abs().max() <= LIMIT


async def test_devices_have_the_scales_of_their_heads(folders, monkeypatch):
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    want = await logprobs(folders["scales of heads"], 1, "fp8")
    got = await logprobs(folders["scales of heads"], 2, "fp8")
    assert (got - want).abs().max() <= LIMIT


async def test_scales_of_another_rank_s_heads_are_found(folders, monkeypatch):
    want = await logprobs(folders["scales of heads"], 1, "fp8")
    real = KeyValueSpec.of_rank
    monkeypatch.setattr(KeyValueSpec, "of_rank", lambda spec, rank, ranks: real(spec, 0, ranks))
    got = await logprobs(folders["scales of heads"], 2, "fp8")
    assert (got - want).abs().max() > LIMIT
