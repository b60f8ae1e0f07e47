"""A family is one file: steps, loader, tables and server do not name it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.models.text
from engine.attention.meta import AttentionMeta
from engine.kernels.gemm.pack import Placement
from engine.layers.attention import PagedSelfAttention
from engine.layers.norm import Normed, RMSNorm
from engine.layers.rope import Rope
from tests import tiny
from tests.engine_kit import answer, running, text_request
from tests.models.harness import Harness, load

PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, tiny.FIRST_SPECIAL, 40)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """transformers' checkpoint under an architecture's name that the registry lacks, and its oracle."""
    model = tiny.gemma2()
    folder = tiny.save(model, tmp_path_factory.mktemp("toy"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["ToyForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.fixture
def registered(monkeypatch):
    """Adds the folder of toy.py to the package of decoders."""
    monkeypatch.setattr(
        engine.models.text, "__path__", [*engine.models.text.__path__, str(Path(__file__).parent / "toy")]
    )


@torch.inference_mode()
def oracle_tokens(model, count):
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers(saved, registered):
    folder, oracle = saved
    harness = Harness(load(folder))
    assert [layer.window for layer in harness.model.config.text.layers] == [8, 0, 8]
    want = oracle(torch.tensor([PROMPT])).logits[0]
    assert (harness.prefill(harness.add(PROMPT), 7) - want).abs().max() <= 1e-4
    assert harness.generate(harness.add(PROMPT), 32, chunk=11) == oracle_tokens(oracle, 32)


async def test_the_engine_serves_it(saved, registered):
    folder, oracle = saved
    async with running(folder) as engine:
        (tokens,) = await answer(engine, text_request(np.array(PROMPT, np.int32), 16, ignore_eos=True))
    assert tokens == oracle_tokens(oracle, 16)


@torch.inference_mode()
def test_a_sink_takes_its_share_of_the_softmax():
    """With one token in the context, the softmax covers the sink and that token's score only."""
    draw = torch.Generator().manual_seed(3)
    text = load(tiny.checkpoint("llama")).config.text
    made = {}
    weights = [torch.randn(rows, text.hidden_size, generator=draw) for rows in (64, 32, 32)]
    sinks = torch.randn(text.num_heads, generator=draw)
    meta = AttentionMeta(
        query_start=torch.tensor([0, 1], dtype=torch.int32), context_len=torch.tensor([1], dtype=torch.int32),
        block_tables=torch.tensor([[0]], dtype=torch.int32), slot_mapping=torch.tensor([0]),
    )  # fmt: skip
    x = Normed(RMSNorm(text.hidden_size, 1e-6), torch.randn(1, text.hidden_size, generator=draw))
    x.norm.weight = torch.ones(text.hidden_size)
    rope = Rope(torch.ones(1, text.head_dim // 2), torch.zeros(1, text.head_dim // 2))
    for has in (False, True):
        attention = PagedSelfAttention(text, replace(text.layers[0], sinks=has))
        attention.qkv.fill({"weight": list(weights)}, Placement(torch.float32, "cpu"))
        if attention.sinks is not None:
            attention.sinks.fill({"sinks": [sinks]}, Placement(torch.float32, "cpu"))
        cache = torch.zeros(2, 1, text.num_kv_heads, 16, text.head_dim)
        keys, values = cache
        made[has] = attention(x, rope, meta, (keys, values)).view(text.num_heads, text.head_dim)
        queries = attention.store(x, rope, meta, (keys, values))[0]
    score = (queries * keys[0, :, 0].repeat_interleave(2, 0)).sum(1) * text.head_dim**-0.5
    torch.testing.assert_close(made[True], made[False] * torch.sigmoid(score - sinks)[:, None])
