"""Bodies with bidirectional attention (ModernBERT, EmbeddingGemma, retrained decoders): transformers' numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import arrays
from tests.engine_kit import running
from tests.pooling_kit import close

pytestmark = pytest.mark.asyncio(loop_scope="session")
DRAW = np.random.default_rng(1)
INPUTS = [DRAW.integers(2, 260, DRAW.integers(1, 100)).astype(np.int32) for _ in range(30)]
FEW_ROWS = {"max_num_seqs": 8, "max_num_queued_reqs": 4, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 0}
BODIES = {
    "modernbert": (kit.modernbert, kit.body_of),
    "embedding gemma": (lambda: kit.seeing_all("gemma3"), kit.body_of),
    "qwen2": (lambda: kit.seeing_all("qwen2"), kit.hidden_seeing_all),
    "qwen3": (lambda: kit.seeing_all("qwen3"), kit.hidden_seeing_all),
    "nvidia llama": (
        lambda: kit.changed(tiny.checkpoint("llama"), "both-ways", architectures=("LlamaBidirectionalModel",)),
        kit.hidden_seeing_all,
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_means_are_those_of_transformers_alone_in_a_crowd_and_as_on_the_device_path(name, monkeypatch):
    made, oracle = BODIES[name]
    folder, settings = made(), {**FEW_ROWS, "runner": "pooling", "pooler": {"pooling_type": "MEAN"}}
    hidden = oracle(folder)
    async with running(folder, **settings) as served:
        together = await arrays(served, INPUTS)
        np.testing.assert_array_equal((await arrays(served, INPUTS[7:8]))[0], together[7])
    for ids, line in list(zip(INPUTS, together))[:10]:
        close(line, hidden(ids.tolist()).mean(0))
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    async with running(folder, **settings) as served:
        for one, other in zip(await arrays(served, INPUTS), together):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("labels", "pooling_by"), [(1, "cls"), (3, "mean")])
async def test_classes_and_scores_of_modernbert(pooling, labels, pooling_by):
    import transformers

    folder = kit.modernbert(labels, classifier_pooling=pooling_by)
    client = await pooling(folder)
    with tiny.quiet(), torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        logits = [model(torch.tensor([ids])).logits[0] for ids in await ids_of(client, FEW)]
        pairs = [client.state.tokenizer.encode_pair(QUERY, document)[0] for document in DOCUMENTS]
        scored = [model(torch.tensor([ids])).logits[0] for ids in pairs]
    data = (await client.post("/classify", {"input": FEW})).json()["data"]
    close([one["probs"] for one in data], [(x.sigmoid() if labels == 1 else x.softmax(-1)).numpy() for x in logits])
    if labels == 1:
        found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
        np.testing.assert_allclose(found, [float(x.sigmoid()) for x in scored], atol=1e-5)


async def test_modernbert_of_older_files():
    new, old = kit.modernbert(), {"rope_parameters": None, "layer_types": None, "global_attn_every_n_layers": 2}
    found = load_model_config(new, {**old, "global_rope_theta": 160_000.0, "local_rope_theta": 20_000.0}).text.layers
    assert [layer.window for layer in found] == [0, 5, 0, 5]
    assert [layer.rope.theta for layer in found] == [160_000.0, 20_000.0] * 2
    assert [layer.window for layer in load_model_config(new).text.layers] == [0, 5, 5, 0]


async def test_what_such_bodies_refuse():
    with pytest.raises(ConfigError, match="cannot generate"):
        load_model_config(kit.seeing_all("gemma3"), {"architectures": ["Gemma3ForCausalLM"]}, runner="generate")
    with pytest.raises(ConfigError, match="capped scores"):
        load_model_config(tiny.checkpoint("gemma2"), {"is_causal": False}, runner="pooling")
    with pytest.raises(ConfigError, match="pooling by 'late'"):
        load_model_config(kit.modernbert(3, classifier_pooling="mean"), {"classifier_pooling": "late"})
    said = load_model_config(kit.seeing_all("qwen2"), {"pooling": "avg"}, pooler={"pooling_type": "LAST"}).pooling
    assert (said.bidirectional, said.whole, said.kind) == (True, True, "last")
