"""Decoder layers with two caches, one, or none: three layers, divided differently, compute the same."""

import numpy as np
import pytest
import torch

import engine.run.built
import engine.run.start
from engine.layers.stream import Product
from engine.models.text.llama import LlamaLayer
from engine.quant.kv import stored_specs
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, running, text_request
from tests.models.harness import Harness, load

PROMPT = np.random.default_rng(5).integers(2, tiny.FIRST_SPECIAL, 41, dtype=np.int32)


def attend(layer, x, rope, meta, cache, index):
    """The attention half of a layer."""
    attended = layer.attention(x.normed(layer.attention_norm), rope, meta, cache)
    x.add(Product(layer.o, x.keep(index, attended)))


class Two(LlamaLayer):
    """Layers 0 and 1 as one layer with two caches."""

    @property
    def mixers(self):
        return [layer.attention for layer in self.all[:2]]

    def __call__(self, x, rope, metas, caches, index):
        assert index is None, "a later layer has a cache"
        for layer, meta, cache in zip(self.all, metas, caches):
            attend(layer, x, rope, meta, cache, None)
            x.add(layer.fed(x, layer.mlp_norm))


class One(LlamaLayer):
    """A layer of layer 2's attention only."""

    @property
    def mixers(self):
        return (self.all[2].attention,)

    def store(self, x, rope, metas, caches):
        self.mixers[0].store(x.normed(self.all[2].attention_norm), rope, *metas, *caches)

    def __call__(self, x, rope, metas, caches, index):
        attend(self.all[2], x, rope, *metas, *caches, index)


class No(LlamaLayer):
    """A layer of layer 2's MLP only."""

    @property
    def mixers(self):
        return ()

    def __call__(self, x, rope, metas, caches, index):
        assert index is None
        self.computed.append(len(x.rows()))
        x.add(self.fed(x, self.mlp_norm))


def divided(model):
    """The model with the same weights in layers of the three classes above."""
    for layer, kind in zip(model.layers, (Two, One, No), strict=True):
        layer.__class__, layer.all, layer.computed = kind, model.layers, []
    model.place_caches()
    return model


@pytest.fixture
def served_so(monkeypatch):
    """Makes the engine divide the models that it builds; returns the list of these models."""
    build, made = engine.run.built.build_model, []
    monkeypatch.setattr(
        engine.run.built, "build_model", lambda *args, **named: made.append(divided(build(*args, **named))) or made[-1]
    )
    return made


def test_logits_are_those_of_the_layers_as_they_were():
    plain, other = (Harness(change(load(tiny.checkpoint("llama")))) for change in (lambda model: model, divided))
    want, got = (harness.prefill(harness.add(PROMPT.tolist()), 9) for harness in (plain, other))
    assert torch.equal(want, got)
    model = other.model
    assert [tuple(model.caches_of(number)) for number in range(3)] == [(0, 1), (2,), ()]
    assert model.cache_specs() == plain.model.cache_specs()


def test_a_layer_behind_the_last_cache_computes_the_tokens_that_are_read():
    harness = Harness(divided(load(tiny.checkpoint("llama"))))
    row, computed = harness.add(PROMPT.tolist()), harness.model.layers[2].computed
    assert len(harness.hidden((row, 20), asked=[])) == 0
    assert computed == []
    harness.hidden((row, 21), asked=[20])
    assert computed == [1]


def test_layers_are_named_by_their_numbers_where_some_have_no_cache_of_their_own():
    specs = stored_specs(divided(load(tiny.checkpoint("llama"))), "fp8", ("1",), None)
    assert [spec.dtype for spec in specs] == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32]


@pytest.mark.parametrize("accelerated", [False, True])
async def test_the_engine_serves_such_layers_with_chunks_and_prefix_hits(accelerated, served_so, monkeypatch):
    if accelerated:
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    wanted = Harness(load(tiny.checkpoint("llama")))
    tokens = wanted.generate(wanted.add(PROMPT.tolist()), 8)
    async with running(tiny.checkpoint("llama"), max_num_batched_tokens=16, debug_poison=True) as served:
        for _ in range(2):
            assert await answer(served, text_request(PROMPT, 8, ignore_eos=True)) == [tokens]
    assert len(served_so) == 1
