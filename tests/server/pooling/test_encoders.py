"""Encoders over HTTP: transformers' numbers, pairs, equal results alone and in batches, on both paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError
from engine.checkpoint.config import resolve_dtype
from engine.layers.distance import REACH, bucket_of, log_buckets
from engine.models.registry import load_model_config
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores, vectors
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import arrays
from tests.engine_kit import running
from tests.pooling_kit import close

pytestmark = pytest.mark.asyncio(loop_scope="session")
KINDS = ("bert", "xlm_roberta", "nomic", "gte", "distilbert", "electra", "mpnet", "albert", "deberta", "deberta-v1")


@pytest.mark.parametrize("kind", KINDS)
async def test_vectors_are_those_of_the_first_token(pooling, kind):
    folder = kit.encoder(kind)
    client, hidden = await pooling(folder), kit.body_of(folder)
    wanted = [kit.unit(hidden(ids)[0]) for ids in await ids_of(client, FEW)]
    close(await vectors(client, FEW), wanted)
    assert (await vectors(client, "")).shape == (1, 64)  # the vector of the special tokens around an empty text


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_one_by_one_and_over_the_limit(pooling, kind):
    folder = kit.encoder(kind)
    client, hidden = await pooling(folder), kit.body_of(folder)
    data = (await client.post("/pooling", {"input": FEW, "task": "token_embed"})).json()["data"]
    for entry, ids in zip(data, await ids_of(client, FEW)):
        close(entry["data"], kit.unit(hidden(ids)))
    long = "a b c d " * 60
    assert (await client.post("/v1/embeddings", {"input": long})).status == 400
    (ids,) = await ids_of(client, [long])
    cut = await vectors(client, long, truncate_prompt_tokens=-1)
    np.testing.assert_array_equal(cut, await vectors(client, [[*ids[:127], ids[-1]]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [1, 3])
async def test_classes_and_scores_are_those_of_transformers(pooling, kind, labels):
    import transformers

    folder = kit.encoder(kind, labels)
    client = await pooling(folder)
    tokenizer = client.state.tokenizer
    with tiny.quiet(), torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        logits = [model(torch.tensor([ids])).logits[0] for ids in await ids_of(client, FEW)]
        pairs = [tokenizer.encode_pair(QUERY, document) for document in DOCUMENTS]
        typed = (lambda types: {"token_type_ids": torch.tensor([types])}) if kind in kit.WITH_TYPES else lambda _: {}
        scored = [model(torch.tensor([ids]), **typed(types)).logits[0] for ids, types in pairs]
    assert any(pairs[0][1]) == (kind in kit.WITH_TYPES)
    data = (await client.post("/classify", {"input": FEW})).json()["data"]
    close([one["probs"] for one in data], [(x.sigmoid() if labels == 1 else x.softmax(-1)).numpy() for x in logits])
    if labels == 1:
        found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
        np.testing.assert_allclose(found, [float(x.sigmoid()) for x in scored], atol=1e-5)
        short = await scores(client, queries=QUERY, documents="the birds " * 99, truncate_prompt_tokens=40)
        assert len(short) == 1


@pytest.mark.parametrize("kind", [*KINDS, "t5", "convolved"])
async def test_alone_as_in_a_crowd_and_as_on_the_device_path(kind, monkeypatch):
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, 260, draw.integers(1, 129)).astype(np.int32) for _ in range(200)]
    few = {"max_num_seqs": 8, "max_num_queued_reqs": 4, "max_num_batched_tokens": 192}
    others = {"t5": lambda: kit.t5("gated-gelu"), "convolved": convolved}
    folder = others[kind]() if kind in others else kit.encoder(kind)
    async with running(folder, num_gpu_blocks_override=0, **few) as served:
        together = await arrays(served, inputs)
        for at in (0, 7, 199):
            np.testing.assert_array_equal((await arrays(served, [inputs[at]]))[0], together[at])
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    for settings in ({}, {"enforce_eager": True}):
        async with running(folder, num_gpu_blocks_override=0, **few, **settings) as served:
            for one, other in zip(await arrays(served, inputs), together):
                np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


async def test_what_encoders_refuse():
    folder = kit.encoder("bert")
    with pytest.raises(ConfigError, match="runner generate"):
        load_model_config(folder, runner="generate")
    with pytest.raises(ConfigError, match="position_embedding_type"):
        load_model_config(folder, {"position_embedding_type": "relative_key"})
    assert load_model_config(kit.encoder("xlm_roberta")).max_position == 128
    assert load_model_config(folder, pooler={"pooling_type": "MEAN"}).pooling.kind == "mean"
    with pytest.raises(ConfigError, match="pooler-config: width is not supported; supported are pooling_type, "):
        load_model_config(folder, pooler={"width": 32})
    with pytest.raises(ConfigError, match="pooler-config: dimensions: this model's vectors cannot be cut"):
        load_model_config(folder, pooler={"dimensions": 32})


async def test_the_operator_says_how_a_classifier_pools():
    folder = kit.encoder("bert", 3)
    own, said = (load_model_config(folder, pooler=given).pooling for given in ({}, {"use_activation": True}))
    assert own == said
    assert (own.kind, own.activation) == ("cls", "softmax")
    told = load_model_config(folder, pooler={"pooling_type": "MEAN", "use_activation": False}).pooling
    assert (told.kind, told.activation, told.tokens_only) == ("mean", "identity", False)


@pytest.mark.parametrize("architecture", ["RobertaForMaskedLM", "CamembertForMaskedLM"])
async def test_a_body_saved_with_the_head_of_its_training_makes_vectors(pooling, architecture):
    """all-distilroberta-v1 and others name the class of their masked training; its head is not read."""
    folder = kit.encoder("xlm_roberta")
    saved = kit.changed(folder, architecture, architectures=(architecture,))
    tensors = kit.load_file(folder / "model.safetensors")
    named = {f"roberta.{name}": tensor for name, tensor in tensors.items() if not name.startswith("pooler")}
    kit.save_file({**named, "lm_head.bias": torch.zeros(4)}, saved / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(await vectors(await pooling(saved), FEW), await vectors(await pooling(folder), FEW))
    with pytest.raises(ConfigError, match="runner generate"):
        load_model_config(saved, runner="generate")


async def test_buckets_of_distances_are_those_of_mpnet():
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    away = torch.arange(-9000, 9001)
    torch.testing.assert_close(bucket_of(away), MPNetEncoder.relative_position_bucket(away))
    assert (bucket_of(away[9000 + REACH :]) == bucket_of(away[-1:])).all()
    with pytest.raises(ConfigError, match="relative_attention_num_buckets"):
        load_model_config(kit.encoder("mpnet"), {"relative_attention_num_buckets": 64})


async def test_distances_of_deberta_are_those_of_transformers():
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    away = torch.arange(-900, 901)
    torch.testing.assert_close(log_buckets(away, 256, 512), make_log_bucket_position(away, 256, 512).long())
    for key, value in (
        ("conv_kernel_size", 4), ("pos_att_type", ["c2p"]), ("share_att_key", False), ("norm_rel_ebd", None),
        ("conv_groups", 2),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            load_model_config(kit.encoder("deberta"), {key: value})
    with pytest.raises(ConfigError, match="conv_act='silu'"):
        load_model_config(kit.encoder("deberta"), {"conv_kernel_size": 3, "conv_act": "silu"})
    for key, value in (("talking_head", True), ("relative_attention", None), ("pos_att_type", ["p2c"])):
        with pytest.raises(ConfigError, match=key):
            load_model_config(kit.encoder("deberta-v1"), {key: value})


@pytest.mark.parametrize(("size", "activation"), [(3, "gelu"), (5, "tanh")])
async def test_a_convolution_parallel_to_the_first_layer_of_deberta(pooling, size, activation):
    """The xlarge models have it. A convolution stays within its input; some inputs are shorter than its kernel."""
    folder = convolved(size, activation)
    client, hidden = await pooling(folder), kit.body_of(folder)
    ids = [*await ids_of(client, FEW), [7], [8, 9], [3]]
    data = (await client.post("/pooling", {"input": ids, "task": "token_embed"})).json()["data"]
    for entry, one in zip(data, ids):
        close(entry["data"], kit.unit(hidden(one)))
    close(await vectors(client, ids), [kit.unit(hidden(one)[0]) for one in ids])
    lone = kit.encoder("deberta", conv_kernel_size=3, conv_act="relu", num_hidden_layers=1)
    client, hidden = await pooling(lone), kit.body_of(lone)  # with one layer, the first layer is also the last
    close(await vectors(client, ids), [kit.unit(hidden(one)[0]) for one in ids])


def convolved(size=3, activation="gelu"):
    return kit.encoder("deberta", conv_kernel_size=size, conv_act=activation)


@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
async def test_vectors_of_t5_are_those_of_its_encoder(pooling, form):
    folder = kit.t5(form)
    client, hidden = await pooling(folder, pooler_config={"pooling_type": "MEAN"}), kit.hidden_of_t5(folder)
    inputs = [*FEW, "in an other land there are the birds " * 5]
    wanted = [kit.unit(hidden(ids).mean(0)) for ids in await ids_of(client, inputs)]
    close(await vectors(client, inputs), wanted)
    with pytest.raises(ConfigError, match="feed_forward_proj"):
        load_model_config(folder, {"feed_forward_proj": "silu"})
    half = {"dtype": "float16", "torch_dtype": "float16"}
    assert resolve_dtype(load_model_config(folder, half), "auto", "cuda") == torch.bfloat16
    assert resolve_dtype(load_model_config(kit.encoder("bert"), half), "auto", "cuda") == torch.float16


async def test_electra_with_wide_embeddings_has_no_product_behind_them(pooling):
    folder = kit.encoder("electra", embedding_size=64)
    client, hidden = await pooling(folder), kit.body_of(folder)
    close(await vectors(client, FEW), [kit.unit(hidden(ids)[0]) for ids in await ids_of(client, FEW)])


async def test_released_files_of_nomic_and_gte():
    """nomic-embed-text-v1 and gte-multilingual-base have these values in their configuration files."""
    from engine.layers.rope import frequencies

    nomic = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 3, "n_positions": 8192, "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None, "prenorm": False,
        "rope_parameters": None, "hidden_size": None, "max_trained_positions": 2048, "causal": False,
    }  # fmt: skip
    found = load_model_config(kit.encoder("nomic"), nomic)
    assert (found.text.hidden_size, found.text.layers[0].rope.theta, found.max_position) == (64, 1000.0, 8192)
    assert load_model_config(kit.encoder("nomic"), {**nomic, "rotary_scaling_factor": 2}).max_position == 2048
    ntk = {"architectures": ["NewModel"], "rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_theta": 20000}
    rope = load_model_config(kit.encoder("gte"), {**ntk, "rope_parameters": None}).text.layers[0].rope
    turns = torch.arange(0, 16, 2) / 16
    torch.testing.assert_close(frequencies(rope, 128), 1 / (8 * 20000) ** turns / 8 ** (2 / 16))
    with pytest.raises(ConfigError, match="mixed_b"):
        load_model_config(kit.encoder("gte"), {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}})
