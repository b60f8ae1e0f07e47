"""JinaBERT over HTTP, against its makers' formulas, written here in torch."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import engine.run.start
from engine.base.errors import ConfigError
from engine.layers.distance import slopes_of
from engine.models.registry import load_model_config
from tests import pooling_kit as kit
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores, vectors
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import arrays
from tests.engine_kit import running

session = pytest.mark.asyncio(loop_scope="session")
LONG = "in an other land there are the birds " * 12
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])  # slopes of four heads


@functools.cache
def checkpoint(labels: int = 0, more_norms: bool = False) -> Path:
    """BERT's random weights with JinaBERT's names, and gates, which BERT lacks."""
    folder = kit.home() / f"jina-bert-{labels}-{more_norms}"
    shutil.copytree(kit.encoder("bert", labels), folder)
    named = {
        "intermediate.dense.weight": "",
        "intermediate.dense.bias": "",
        "output.dense": "mlp.wo",
        "output.LayerNorm": "mlp.layernorm",
    }
    made: dict[str, torch.Tensor] = {}
    for name, tensor in kit.load_file(folder / "model.safetensors").items():
        before, _, inside = name.partition("encoder.layer.")
        number, _, rest = inside.partition(".")
        if inside and not rest.startswith("attention."):
            rest = next((new and rest.replace(old, new) for old, new in named.items() if rest.startswith(old)), rest)
        if "position" not in name and (rest or not inside):
            made[f"{before}encoder.layer.{number}.{rest}" if inside else name] = tensor
    drawn, start = torch.Generator().manual_seed(5), "bert." if labels else ""
    for number in range(3):
        layer, gates = f"{start}encoder.layer.{number}.", torch.randn(192, 64, generator=drawn) / 8
        made[f"{layer}mlp.gated_layers.weight"] = gates
        if more_norms:
            made[f"{layer}mlp.up_gated_layer.weight"] = made.pop(f"{layer}mlp.gated_layers.weight").roll(96, 0)
            for kind in ("weight", "bias"):
                made[f"{layer}mlp.down_layer.{kind}"] = made.pop(f"{layer}mlp.wo.{kind}")
                made[f"{layer}layer_norm_2.{kind}"] = made.pop(f"{layer}mlp.layernorm.{kind}")
                for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1"):
                    made[f"{layer}{name}.{kind}"] = torch.rand(64, generator=drawn) + (kind == "weight")
    kit.save_file(made, folder / "model.safetensors", {"format": "pt"})
    said = {
        "architectures": ["JinaBertForSequenceClassification" if labels else "JinaBertForMaskedLM"],
        "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean",
        "max_position_embeddings": 300,
    }  # fmt: skip
    if more_norms:
        said["auto_map"] = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
    kit.write(folder / "config.json", {**kit.read(folder / "config.json"), **said})
    return folder


def hidden(folder: Path, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """The body's hidden states [tokens, 64]."""
    weights = {name.removeprefix("bert."): one for name, one in kit.load_file(folder / "model.safetensors").items()}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        if f"{name}.weight" not in weights:
            return x
        return functional.layer_norm(x, (64,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    row = torch.arange(len(ids))
    alibi = -SLOPES[:, None, None] * (row[:, None] - row).abs()
    kinds = weights["embeddings.token_type_embeddings.weight"][torch.tensor(types or [0] * len(ids))]
    x = norm("embeddings.LayerNorm", weights["embeddings.word_embeddings.weight"][torch.tensor(ids)] + kinds)
    for number in range(3):
        layer = f"encoder.layer.{number}."
        q, k, v = (linear(f"{layer}attention.self.{part}", x) for part in ("query", "key", "value"))
        q, k = (norm(f"{layer}attention.self.layer_norm_{part}", one) for part, one in (("q", q), ("k", k)))
        q, k, v = (one.view(-1, 4, 16).transpose(0, 1) for one in (q, k, v))
        attended = ((q @ k.transpose(1, 2) / 4 + alibi).softmax(-1) @ v).transpose(0, 1).reshape(-1, 64)
        inner = norm(f"{layer}attention.output.LayerNorm", linear(f"{layer}attention.output.dense", attended) + x)
        more_norms = f"{layer}layer_norm_1.weight" in weights
        x = norm(f"{layer}layer_norm_1", inner + x) if more_norms else inner
        gate, up = (
            linear(f"{layer}mlp.gated_layers", x).chunk(2, -1)
            if not more_norms
            else (linear(f"{layer}mlp.up_gated_layer", x).chunk(2, -1)[::-1])
        )
        inner = functional.gelu(gate) * up
        if more_norms:
            x = norm(f"{layer}layer_norm_2", linear(f"{layer}mlp.down_layer", inner) + x)
        else:
            x = norm(f"{layer}mlp.layernorm", linear(f"{layer}mlp.wo", inner) + x)
    return x


@session
@pytest.mark.parametrize("more_norms", [False, True])
async def test_vectors_are_the_mean_of_all_tokens(pooling, more_norms):
    folder = checkpoint(more_norms=more_norms)
    client = await pooling(folder)
    texts = [*FEW, LONG]
    ids = await ids_of(client, texts)
    assert len(ids[-1]) > 150
    close = [kit.unit(hidden(folder, one).mean(0).numpy()) for one in ids]
    kit.close(await vectors(client, texts), close)


@session
async def test_rerankers_read_pairs(pooling):
    folder = checkpoint(1)
    client, weights = await pooling(folder), kit.load_file(folder / "model.safetensors")
    wanted = []
    for ids, types in (client.state.tokenizer.encode_pair(QUERY, document) for document in DOCUMENTS):
        first = hidden(folder, ids, types)[0]
        tanh = torch.tanh(
            functional.linear(first, weights["bert.pooler.dense.weight"], weights["bert.pooler.dense.bias"])
        )
        wanted.append(
            float(functional.linear(tanh, weights["classifier.weight"], weights["classifier.bias"]).sigmoid())
        )
    np.testing.assert_allclose(await scores(client, text_1=QUERY, text_2=DOCUMENTS), wanted, atol=1e-5)


@session
@pytest.mark.parametrize("more_norms", [False, True])
async def test_the_device_path_makes_the_same_arrays(monkeypatch, more_norms):
    folder = checkpoint(more_norms=more_norms)
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, 260, draw.integers(1, 301)).astype(np.int32) for _ in range(12)]
    few = {"max_num_seqs": 8, "max_num_queued_reqs": 4, "max_num_batched_tokens": 320, "num_gpu_blocks_override": 0}
    async with running(folder, **few) as served:
        together = await arrays(served, inputs)
        np.testing.assert_array_equal((await arrays(served, inputs[7:8]))[0], together[7])
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(folder, **few) as served:
        for one, other in zip(await arrays(served, inputs), together):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def test_slopes_of_heads_that_are_no_power_of_two():
    """Twelve heads have the slopes of eight heads, then every second slope of sixteen heads."""
    assert slopes_of(4) == SLOPES.tolist()
    assert slopes_of(12) == [2.0**-k for k in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"feed_forward_type": "reglu"}, "feed_forward_type"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
        ({"emb_pooler": "attention"}, "pooling by 'attention'"),
    ],
)
def test_what_is_refused(said, named):
    with pytest.raises(ConfigError, match=named):
        load_model_config(checkpoint(more_norms=False), said)
