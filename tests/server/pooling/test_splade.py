"""SPLADE over HTTP: the weights and products of sentence-transformers' SparseEncoder; both paths."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine.run.start
from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from engine.pooling import heads
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, QUERY, scores, vectors
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import arrays
from tests.engine_kit import running
from tests.pooling_kit import close

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEXTS = [text for text in kit.TEXTS if text]
NAMES = {
    "bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "mpnet": "MPNet",
    "camembert": "Camembert", "electra": "Electra", "albert": "Albert", "modernbert": "ModernBert",
}  # fmt: skip
BEHIND_PADDING = ("roberta", "xlm_roberta", "camembert", "mpnet")  # positions begin after the padding id
TWICE = "log1p_relu"


@functools.cache
def checkpoint(kind: str, old: bool = True, similarity: str | None = None, activation: str = "relu") -> Path:
    """A masked language model with SparseEncoder's modules; `old`: with the names of sentence-transformers 5."""
    import transformers

    renamed = kit.OF_DISTILBERT if kind == "distilbert" else {}
    sizes: dict[str, Any] = {renamed.get(key, key): size for key, size in zip(kit.SIZES, (64, 96, 3, 4))}
    if kind in ("electra", "albert"):
        sizes["embedding_size"] = 32
    sizes |= {"max_position_embeddings": 130 if kind in BEHIND_PADDING else 128, "pad_token_id": 1}
    values = kit.MODERN if kind == "modernbert" else {"vocab_size": tiny.VOCAB_SIZE, **sizes}
    folder = kit.home() / f"splade-{kind}-{old}-{similarity}-{activation}"
    with tiny.quiet():
        config = getattr(transformers, f"{NAMES[kind]}Config")(**values)
        model = tiny._model(getattr(transformers, f"{NAMES[kind]}ForMaskedLM"), config)
    bias = torch.randn(tiny.VOCAB_SIZE, generator=torch.Generator().manual_seed(9))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.shape == bias.shape:
            parameter.data = bias.clone()
    tiny.save(model, folder)
    first = "sparse_encoder.models.MLMTransformer" if old else "base.modules.transformer.Transformer"
    listed = [("", first), ("1_SpladePooling", "sparse_encoder.models.SpladePooling")]
    kit.write(
        folder / "modules.json",
        [
            {"idx": at, "name": str(at), "path": path, "type": f"{kit.ST}.{kind}"}
            for at, (path, kind) in enumerate(listed)
        ],
    )
    kit.write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    kit.write(
        folder / "1_SpladePooling" / "config.json", {"pooling_strategy": "max", "activation_function": activation}
    )
    said = {"model_type": "SparseEncoder", "prompts": {}, "similarity_fn_name": similarity}
    kit.write(folder / "config_sentence_transformers.json", said)
    return kit.framed(folder, "bert")


@functools.cache
def oracle(folder: Path) -> Any:
    """The folder in sentence-transformers, float32 on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SparseEncoder

        return SparseEncoder(str(folder), device="cpu")


def weights(folder: Path, texts: list[str]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = oracle(folder).encode(texts, batch_size=1, convert_to_sparse_tensor=False)
    return found.numpy()


@pytest.mark.parametrize(
    ("kind", "activation"), [*((kind, "relu") for kind in NAMES), ("distilbert", TWICE), ("modernbert", TWICE)]
)
async def test_weights_are_those_of_sentence_transformers(pooling, kind, activation):
    folder = checkpoint(kind, activation=activation)
    client, wanted = await pooling(folder), weights(folder, TEXTS)
    assert wanted.shape == (len(TEXTS), tiny.VOCAB_SIZE)
    assert 0.05 < (wanted == 0).mean() < 0.9, "relu has something to do"
    close(await vectors(client, TEXTS), wanted)
    for text, one in zip(TEXTS, wanted):
        close(await vectors(client, text), [one])
    data = (await client.post("/pooling", {"input": TEXTS})).json()["data"]
    close([one["data"] for one in data], wanted)


@pytest.mark.parametrize("similarity", [None, "cosine"])
async def test_scores_are_products_or_cosines(pooling, similarity):
    folder = checkpoint("bert", similarity=similarity)
    client = await pooling(folder)
    query, *documents = weights(folder, [QUERY, *DOCUMENTS])
    if similarity == "cosine":
        query, documents = kit.unit(query), kit.unit(np.stack(documents))
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(found, [float(query @ one) for one in documents], rtol=1e-5)


async def test_tokens_one_by_one_are_not_to_be_had(pooling):
    client = await pooling(checkpoint("bert"))
    assert (await client.post("/pooling", {"input": "x", "task": "token_embed"})).status >= 400
    assert (await client.post("/v1/embeddings", {"input": "x", "dimensions": 8})).status == 400


class Largest(TorchDispatchMode):
    """Records the largest new tensor that has an axis of the vocabulary's size, in rows of that size."""

    rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and tiny.VOCAB_SIZE in made.shape:
            self.rows = max(self.rows, made.numel() // tiny.VOCAB_SIZE)
        return made


async def test_logits_of_a_few_tokens_at_a_time_are_in_memory(monkeypatch):
    folder, large = checkpoint("bert"), Largest()
    inputs = [np.arange(2, 2 + count, dtype=np.int32) for count in (100, 1, 31, 128, 60, 90)]
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 0}
    async with running(folder, **settings) as served:
        wanted = await arrays(served, inputs)
    lines = heads.Pooler.lines

    def watched(self, *args):
        with large:
            return lines(self, *args)

    monkeypatch.setattr(heads, "LOGITS_OF", 32)
    monkeypatch.setattr(heads.Pooler, "lines", watched)
    async with running(folder, **settings) as served:
        found = await arrays(served, inputs)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert sum(map(len, inputs)) == 410, "more than once as many as are computed together"
    assert 0 < large.rows <= 64, "of 32 tokens with the embeddings' table transposed"


@pytest.mark.parametrize("kind", ["bert", "albert", "xlm_roberta", "modernbert"])
async def test_alone_as_in_a_crowd_and_as_on_the_device_path(kind, monkeypatch):
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, 260, draw.integers(1, 129)).astype(np.int32) for _ in range(40)]
    few = {"max_num_seqs": 8, "max_num_queued_reqs": 4, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 0}
    monkeypatch.setattr(heads, "LOGITS_OF", 80)  # an input's tokens are in up to three parts
    async with running(checkpoint(kind), **few) as served:
        together = await arrays(served, inputs)
        for at in (0, 7, 39):
            np.testing.assert_allclose((await arrays(served, [inputs[at]]))[0], together[at], rtol=0, atol=1e-5)
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    for settings in ({}, {"enforce_eager": True}):
        async with running(checkpoint(kind), **few, **settings) as served:
            for one, other in zip(await arrays(served, inputs), together):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


async def test_files_of_both_generations_and_what_is_refused():
    assert load_model_config(checkpoint("bert")).pooling == load_model_config(checkpoint("bert", old=False)).pooling
    folder = kit.changed(checkpoint("distilbert", old=False), "splade-refused")
    assert load_model_config(folder).pooling.compares_products
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load_model_config(folder, {"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match="hidden_act='quick_gelu' is not supported with SpladePooling"):
        load_model_config(folder, {"activation": "quick_gelu"})
    for key, value in {"pooling_strategy": "sum", "activation_function": "tanh"}.items():
        kit.write(folder / "1_SpladePooling" / "config.json", {key: value})
        with pytest.raises(ConfigError, match=f"{key}='{value}' is not supported; supported: "):
            load_model_config(folder)
    with pytest.raises(ConfigError, match="--pooler-config: this model pools as its files say"):
        load_model_config(checkpoint("bert"), pooler={"pooling_type": "CLS"})
    other = kit.changed(kit.encoder("deberta"), "splade-deberta")
    kit.write(other / "modules.json", kit.read(folder / "modules.json"))
    with pytest.raises(ConfigError, match=r"SpladePooling is supported behind the \.\.\.ForMaskedLM of BERT, RoBERTa"):
        load_model_config(other)


async def test_an_encoder_without_the_head_that_fills_gaps_is_refused():
    folder = kit.changed(kit.encoder("electra"), "splade-without-a-head")
    whole = checkpoint("electra")
    for name in ("modules.json", "1_SpladePooling/config.json"):
        kit.write(folder / name, kit.read(whole / name))
    with pytest.raises(ConfigError, match=r"missing: generator_predictions\.dense"):
        async with running(folder):
            pass
