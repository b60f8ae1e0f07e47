"""Text decoders against transformers on tiny checkpoints: logits in one step, in chunks, in batches; greedy tokens."""

import functools
import json
import random
from dataclasses import replace

import pytest
import torch

from engine.layers.rope import frequencies
from engine.models.registry import build_model
from tests import tiny
from tests.models.harness import Harness
from tests.models.harness import load as load_model

NAMES = [name for name in tiny.CHECKPOINTS if name not in ("omni", "qwen2_5_vl", *tiny.SPARSE)]
TOLERANCE = 1e-4
load = functools.cache(load_model)


@functools.cache
def oracle(name):
    return tiny.reference(tiny.checkpoint(name))


def prompt(length, seed=0):
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(tiny.VOCAB_SIZE) for _ in range(length)]


@torch.inference_mode()
def expected(name, tokens):
    return oracle(name)(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 17, 100])
def test_prefill_logits_equal_transformers(name, length):
    harness = Harness(load(tiny.checkpoint(name)))
    tokens = prompt(length)
    got = harness.prefill(harness.add(tokens))
    assert got.dtype == torch.float32
    assert (got - expected(name, tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_equals_transformers(name, chunk):
    harness = Harness(load(tiny.checkpoint(name)))
    tokens = prompt(50, seed=1)
    got = harness.prefill(harness.add(tokens), chunk)
    assert (got - expected(name, tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_mixed_rows_equal_each_row_alone(name):
    harness = Harness(load(tiny.checkpoint(name)))
    first, second, third = (harness.add(prompt(length, seed=2)) for length in (40, 23, 9))
    harness.step((first, 39))
    harness.step((second, 10))
    got = harness.step((first, 1), (second, 13), (third, 9))
    want = [expected(name, first.tokens)[39:], expected(name, second.tokens)[10:], expected(name, third.tokens)]
    assert (got - torch.cat(want)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name):
    harness = Harness(load(tiny.checkpoint(name)))
    tokens, count = prompt(30, seed=3), 32 if name in tiny.FAMILIES else 64
    got = harness.generate(harness.add(tokens), count, chunk=11)
    assert got == greedy(name, tokens, count)


@functools.cache
@torch.inference_mode()
def _greedy(name, tokens, count):
    model = oracle(name)
    model.generation_config.eos_token_id = None  # so that all `count` tokens are generated
    ids = torch.tensor([tokens])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()


def greedy(name, tokens, count):
    return _greedy(name, tuple(tokens), count)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_tokens_that_are_asked_for_have_the_bits_that_they_have_among_all(name, dtype):
    """Hidden states of requested tokens (or of none) equal those of a whole step; the cache has all keys and values."""
    model = load(tiny.checkpoint(name), dtype=dtype)
    lengths = (40, 23, 9)

    def computed(asked, out=None):
        harness = Harness(model)
        first, second, third = (harness.add(prompt(length, seed=2)) for length in lengths)
        harness.hidden((first, 39), (second, 10), asked=None if asked is None else [])
        return harness.hidden((first, 1), (second, 13), (third, 9), asked=asked, out=out), harness.caches

    whole, wanted = computed(None)
    assert whole.shape == (23, model.config.text.hidden_size)
    for asked in ([0, 13, 22], [7], [22, 3, 3, 0], list(range(23)), []):
        room = torch.full((len(asked), whole.shape[1]), float("nan"), dtype=whole.dtype)
        for out in (None, room):
            got, caches = computed(asked, out)
            assert torch.equal(got, whole[asked])
            assert out is None or torch.equal(out, whole[asked])
            for ours, theirs in zip(caches, wanted):
                assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, theirs))


def test_contexts_beyond_the_original_have_the_long_frequencies(tmp_path):
    """A server of long contexts uses the long frequencies for all requests, because short and long ones share keys."""
    made = tiny.causal("Phi3ForCausalLM", "Phi3Config", **tiny.longrope(16))()
    folder = tiny.save(made, tmp_path / "long")
    harness = Harness(load_model(folder))
    tokens = prompt(60, seed=8)
    with torch.inference_mode():
        want = tiny.reference(folder)(input_ids=torch.tensor([tokens])).logits[0]
    assert (harness.prefill(harness.add(tokens), 7) - want).abs().max() <= TOLERANCE
    config = harness.model.config
    short = build_model(replace(config, max_model_len=16), torch.float32)
    assert torch.equal(short.ropes[0].inv_freq, frequencies(config.text.layers[0].rope, 16))
    assert not torch.equal(short.ropes[0].inv_freq, harness.model.ropes[0].inv_freq)


def test_internlm3_is_llama_with_other_words(tmp_path):
    """modeling_internlm3.py of internlm/internlm3-8b-instruct has these formulas; transformers lacks it."""
    folder = tiny.save(tiny.llama(attention_bias=True, mlp_bias=True, head_dim=24), tmp_path / "internlm3")
    with torch.inference_mode():
        want = tiny.reference(folder)(input_ids=torch.tensor([prompt(30)])).logits[0]
    config = json.loads((folder / "config.json").read_text())
    words = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": True}
    for word in ("attention_bias", "mlp_bias"):
        del config[word]
    (folder / "config.json").write_text(json.dumps({**config, **words}))
    harness = Harness(load_model(folder))
    assert (harness.prefill(harness.add(prompt(30))) - want).abs().max() <= TOLERANCE


def test_sliding_window_changes_the_answer():
    """Without this, the window tests above would pass for a model that ignores its window."""
    tokens = prompt(60, seed=4)
    harness = Harness(load(tiny.checkpoint("mistral-window")))
    windowed = harness.prefill(harness.add(tokens))
    harness = Harness(load(tiny.checkpoint("mistral")))
    assert (windowed - harness.prefill(harness.add(tokens))).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(name):
    model = load(tiny.checkpoint(name), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    harness = Harness(model)
    tokens = prompt(33, seed=5)
    got = harness.prefill(harness.add(tokens), chunk=10)
    want = expected(name, tokens)
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < 0.05 * want.abs().mean() + 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_company_do_not_change_a_bit(name, dtype):
    harness = Harness(load(tiny.checkpoint(name), dtype=dtype), num_rows=6)
    tokens = prompt(70, seed=6)
    whole = harness.prefill(harness.add(tokens))
    for chunk in (1, 7, 64):
        assert torch.equal(harness.prefill(harness.add(tokens), chunk), whole)
    row, other = harness.add(tokens), harness.add(prompt(50, seed=7))
    harness.step((other, 30), (row, 40))
    assert torch.equal(harness.step((other, 1), (row, 30))[1:], whole[40:])
