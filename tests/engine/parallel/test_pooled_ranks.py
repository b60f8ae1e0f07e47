"""Pooling models on ranks make one rank's arrays, which are transformers': decoders, encoders, towers; both paths."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import engine.run.start
from engine import Engine, EngineConfig, FinishReason
from engine.base.config import RanksConfig
from engine.base.errors import ConfigError
from engine.parallel.pieces import axes_of, cut, places_on
from engine.weights.table import expand
from tests import nomic_kit, tiny_towers
from tests import pooling_kit as kit
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.parallel.kit import split
from tests.engine.parallel.test_split_models import LIMIT, in_full
from tests.engine.test_pooled_pictures import request as of_pictures
from tests.engine.test_pooling_steps import INPUTS, POOLS, answered, arrays, request
from tests.engine_kit import SMALL, running
from tests.server.pooling import test_jina_bert, test_jina_embeddings_v3, test_splade

FEW = INPUTS[:9]
DECODERS = {
    "last token": lambda: kit.embedder("qwen3"),
    "mean and dense": lambda: kit.embedder("qwen3", "mean_tokens", dense=24),
    "classes": lambda: kit.classifier("llama", "LlamaForSequenceClassification", 3),
    "rewards": lambda: kit.rewarding("Qwen2ForRewardModel", 1),
    "logits of tokens": lambda: kit.logit_score(kit.PAIR_TEMPLATE),
    "embedding gemma": lambda: kit.seeing_all("gemma3"),
    "both ways": lambda: kit.seeing_all("llama"),
}
ENCODERS = {
    "bert": lambda: kit.encoder("bert"),
    "modernbert": kit.modernbert,
    "deberta": lambda: kit.encoder("deberta", conv_kernel_size=3, conv_act="gelu"),
    "deberta-v1": lambda: kit.encoder("deberta-v1"),
    "t5": lambda: kit.t5("gated-gelu"),
    "jina": lambda: test_jina_bert.checkpoint(more_norms=False),
    "jina with norms of queries": lambda: test_jina_bert.checkpoint(more_norms=True),
    "nomic moe": nomic_kit.checkpoint,
    "mpnet": lambda: kit.encoder("mpnet"),
    "gte": lambda: kit.encoder("gte"),
    "albert": lambda: kit.encoder("albert"),
    "nomic": lambda: kit.encoder("nomic"),
    "xlm_roberta": lambda: kit.encoder("xlm_roberta", 3),
    "distilbert": lambda: kit.encoder("distilbert"),
    "electra": lambda: kit.encoder("electra"),
    "classes of pairs": lambda: kit.modernbert(3),
    "splade": lambda: test_splade.checkpoint("bert"),
    "token weights": kit.bge_m3,
}
BODIES = DECODERS | ENCODERS
OFTEN = ["last token", "mean and dense", "classes", "bert", "modernbert", "deberta-v1", "t5", "nomic moe"]
OFTEN += ["jina with norms of queries"]
often = [name if name in OFTEN else in_full(name) for name in BODIES]
on_both = [*OFTEN[:2], "bert", *map(in_full, ("classes", "modernbert", "deberta"))]


async def found(folder, ranks, asked=None, **settings):
    async with running(folder, **{**POOLS, "tensor_parallel": ranks, **settings}) as served:
        return await answered(served, asked or request(FEW))


def alike(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=LIMIT * max(1.0, np.abs(other).max()))


@pytest.fixture
def on_devices(monkeypatch):
    """A function: engines started next have accelerators."""

    def switch():
        monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())

    return switch


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", often)
async def test_arrays_are_those_of_one_rank(name, ranks):
    folder = BODIES[name]()
    alike(await found(folder, ranks), await found(folder, 1))


@pytest.mark.parametrize(("name", "at"), [("last token", -1), ("bert", 0), ("modernbert", 0)])
async def test_arrays_are_those_of_transformers(name, at):
    folder = BODIES[name]()
    hidden = kit.body_of(folder)
    wanted = [hidden(ids.tolist())[at] for ids in FEW]
    for ranks in (2, 4):
        got = await found(folder, ranks)
        alike(got, wanted)
        for one, other in zip(got, wanted):
            assert kit.unit(one) @ kit.unit(other) >= 1 - LIMIT


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", on_both)
async def test_the_device_path_makes_the_hosts_arrays(on_devices, name, ranks):
    folder, tokens = BODIES[name](), request(FEW, per_token=True)
    wanted, of_tokens = await found(folder, 1), await found(folder, 1, tokens)
    on_devices()
    for settings in ({}, {"enforce_eager": True}):
        alike(await found(folder, ranks, **settings), wanted)
    alike(await found(folder, ranks, tokens), of_tokens)


@pytest.mark.parametrize("on_device", [False, True])
async def test_chunks_cached_prefixes_and_preemption_change_nothing(on_devices, on_device):
    folder = BODIES["last token"]()
    wanted = await found(folder, 1)
    if on_device:
        on_devices()
    chunks = {"max_prefill_chunk": 7, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}
    async with running(folder, **{**POOLS, **chunks, "tensor_parallel": 2}) as served:
        for _ in range(2):  # the second time from the cache
            alike(await arrays(served, FEW), wanted)


@pytest.mark.parametrize("on_device", [False, True])
async def test_the_second_text_of_a_pair_has_its_type_on_all_ranks(on_devices, on_device):
    folder = kit.encoder("bert", 3)
    plain = request(FEW[1:])
    halves = np.array([len(ids) // 2 for ids in FEW[1:]], np.int32)
    asked = replace(plain, pooling=replace(plain.pooling, seconds=halves))
    wanted = await found(folder, 1, asked)
    assert max(np.abs(one - other).max() for one, other in zip(wanted, await found(folder, 1, plain))) > 10 * LIMIT
    if on_device:
        on_devices()
    alike(await found(folder, 2, asked), wanted)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", ["released", in_full("transformers")])
async def test_inputs_have_the_adapters_of_their_tasks(on_devices, layout, on_device):
    folder, plain = test_jina_embeddings_v3.checkpoint(layout), request(FEW)
    numbers = (np.arange(len(FEW)) % 6).astype(np.int32)
    asked = replace(plain, pooling=replace(plain.pooling, adapters=numbers))
    wanted = await found(folder, 1, asked)
    if on_device:
        on_devices()
    alike(await found(folder, 2, asked), wanted)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", ["clip", *map(in_full, ("siglip", "siglip2"))])
async def test_rank_0_has_the_towers_of_pictures(on_devices, kind, on_device):
    folder, asked = tiny_towers.checkpoint(kind), of_pictures(kind)
    rows = {"max_num_seqs": 4, "dtype": "float32", "max_model_len": 0}
    wanted = await found(folder, 1, asked, **rows)
    if on_device:
        on_devices()
    for settings in ({}, {"enforce_eager": True}) if on_device else ({},):
        alike(await found(folder, 2, asked, **rows, **settings), wanted)


@pytest.mark.parametrize("name", ["mean and dense", "classes", "bert", "deberta-v1", "t5", "nomic moe"])
def test_a_weight_is_held_once_or_by_every_rank(name):
    model = split(BODIES[name](), 2)
    members = [expand(member.weight_table(), member) for member in model.members]
    for full, place in expand(model.whole.weight_table(), model.whole).items():
        numbers = torch.arange(torch.Size(place.wanted.shape).numel()).view(place.wanted.shape)
        parts = [cut(numbers, axes_of(place), rank, 2) for rank in range(2)]
        assert [part.shape for part in parts] == [places[full].wanted.shape for places in members]
        counts = set(torch.cat([part.flatten() for part in parts]).bincount(minlength=numbers.numel()).tolist())
        assert counts == ({1} if any(axes_of(place)) else {2})
    poolers = {full for full, place in members[0].items() if any(place.part is each for each in model.pooler.layers)}
    assert poolers == {full for full in members[0] if full not in places_on(model.members[1], 1)}
    assert bool(poolers) == (name == "classes")
    model.close()


async def test_a_rank_that_fails_ends_the_step_and_the_next_input_is_answered():
    async with running(BODIES["bert"](), **{**POOLS, "tensor_parallel": 2}) as served:
        wanted = await arrays(served, FEW)
        layer = served.inspect().runtime.model.members[1].layers[1]
        product, layer.o = layer.o, None
        async with served.submit(request(FEW[:1])) as stream:
            ends = [delta.finish_reason async for delta in stream]
        assert ends == [FinishReason.ERROR]
        layer.o = product
        alike(await arrays(served, FEW), wanted)


@pytest.mark.parametrize(
    ("folder", "settings", "said"),
    [
        (
            nomic_kit.checkpoint,
            {"ranks": RanksConfig(True)},
            "ranks share the width of NomicBertModel's experts; leave it out",
        ),
        (lambda: kit.encoder("bert"), {"tensor_parallel": 3}, "4 heads and 4 key-value heads .* possible: 1, 2, 4$"),
    ],
)
async def test_what_is_not_dealt_out_is_refused_by_name(folder, settings, said):
    started = Engine(EngineConfig(model=str(folder()), **{**SMALL, "tensor_parallel": 2, **settings}))
    with pytest.raises(ConfigError, match=said):
        await started.start()
