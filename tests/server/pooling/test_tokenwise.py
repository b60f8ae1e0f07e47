"""Results for each token: classes of tokens, rewards of steps, BGE-M3's three outputs."""

from __future__ import annotations

import string

import numpy as np
import pytest
import torch

from engine.base.errors import ConfigError
from engine.models.registry import load_model_config
from server import cli
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores, vectors
from tests.pooling_kit import close

pytestmark = pytest.mark.asyncio(loop_scope="session")
# Files of the tiny checkpoint -> their names and form in the published repository.
PUBLISHED = {"model.safetensors": "pytorch_model.bin"} | {
    f"{name}_linear.safetensors": f"{name}_linear.pt" for name in ("sparse", "colbert")
}
TAG = tiny.IDS["<|vision_pad|>"]  # stands for <extra_0>, which the tiny tokenizer lacks


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


async def pooled(client, inputs, task=None, **fields):
    answer = await client.post("/pooling", {"input": inputs, "task": task, **fields})
    assert answer.status == 200, answer.content
    return [np.array(entry["data"], np.float32) for entry in answer.json()["data"]]


@pytest.mark.parametrize("kind", ["bert", "xlm_roberta", "modernbert", "llama"])
async def test_classes_of_tokens_are_those_of_transformers(pooling, kind):
    from transformers import AutoModelForTokenClassification

    folder = kit.of_tokens(kind)
    client = await pooling(folder)
    with tiny.quiet(), torch.no_grad():
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = [model(torch.tensor([ids])).logits[0].numpy() for ids in await ids_of(client, FEW)]
    for found, raw, logits in zip(
        await pooled(client, FEW), await pooled(client, FEW, "token_classify", use_activation=False), wanted
    ):
        close(found, softmax(logits))
        close(raw, logits)
    for path in ("/classify", "/v1/embeddings"):
        assert (await client.post(path, {"input": "x"})).status == 501
    assert (await client.post("/score", {"text_1": "x", "text_2": "y"})).status == 501
    assert (await client.post("/pooling", {"input": "x", "task": "classify"})).status == 400


def rewards(folder, ids):
    tensors = {name: tensor.numpy() for name, tensor in kit.load_file(folder / "model.safetensors").items()}
    hidden = kit.body_of(folder)(ids)
    inner = np.maximum(hidden @ tensors["score.0.weight"].T + tensors["score.0.bias"], 0)
    return inner @ tensors["score.2.weight"].T + tensors["score.2.bias"]


async def test_steps_are_rewarded_where_they_end(pooling):
    folder = kit.rewarding("Qwen2ForProcessRewardModel", 2)
    client = await pooling(folder, pooler_config={"step_tag_id": TAG})
    ids = [5, 6, TAG, 7, 8, 9, TAG, 10]
    (found,) = await pooled(client, [ids])
    close(found, softmax(rewards(folder, ids)[[2, 6]]))
    refused = await client.post("/pooling", {"input": [[5, TAG], [5, 6]]})
    assert (refused.status, refused.error["param"]) == (400, "input[1]")
    with pytest.raises(ConfigError, match="step_tag_id"):
        load_model_config(folder)


async def test_the_reward_of_an_input_is_that_of_its_last_token(pooling):
    folder = kit.rewarding("Qwen2ForRewardModel", 1)
    client = await pooling(folder)
    ids = [5, 6, 7, 8, 9]
    (found,) = await pooled(client, [ids])
    close(found, rewards(folder, ids)[-1])


async def test_the_operator_may_ask_for_the_reward_of_every_token(pooling):
    folder, ids = kit.rewarding("Qwen2ForRewardModel", 1), [5, 6, 7, 8, 9]
    client = await pooling(folder, pooler_config={"pooling_type": "ALL"})
    (found,) = await pooled(client, [ids])
    close(found, rewards(folder, ids))
    assert (await client.post("/classify", {"input": [ids]})).status == 501


async def test_tokens_of_a_language_model_as_the_classes_of_steps(pooling):
    told = {"pooling_type": "STEP", "step_tag_id": TAG, "returned_token_ids": [11, 12]}
    client = await pooling(tiny.checkpoint("qwen3"), runner="pooling", pooler_config=told)
    ids = [5, TAG, 6, 7, TAG]
    with torch.no_grad():
        logits = tiny.reference(tiny.checkpoint("qwen3"))(torch.tensor([ids])).logits[0].numpy()
    (found,) = await pooled(client, [ids])
    close(found, softmax(logits[[1, 4]][:, [11, 12]]))
    for bad in ({"pooling_type": "STEP"}, {"returned_token_ids": []}, {"step_tag_id": "x"}):
        with pytest.raises(ConfigError, match="pooler-config"):
            load_model_config(tiny.checkpoint("qwen3"), runner="pooling", pooler=bad)


async def test_the_three_outputs_of_bge_m3_as_it_is_published(pooling, tmp_path):
    """Its weights and the layers for tokens are pickles, which `convert` writes as safetensors."""
    folder = kit.shutil.copytree(kit.bge_m3(), tmp_path / "bge-m3")
    for name, pickled in PUBLISHED.items():
        torch.save(kit.load_file(folder / name), folder / pickled)
        (folder / name).unlink()
    assert cli.main(["convert", str(folder)]) == 0
    client, hidden = await pooling(folder), kit.body_of(kit.bge_m3())
    layers = {name: torch.load(folder / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")}

    def through(name, rows):
        return rows @ layers[name]["weight"].numpy().T + layers[name]["bias"].numpy()

    lists = await ids_of(client, FEW)
    close(await vectors(client, FEW), [kit.unit(hidden(ids)[0]) for ids in lists])
    weights, many = await pooled(client, FEW, "token_classify"), await pooled(client, FEW, "token_embed")
    for ids, sparse, colbert in zip(lists, weights, many):
        rows = hidden(ids)
        np.testing.assert_allclose(sparse, np.maximum(through("sparse", rows[1:-1]), 0), atol=1e-5)
        close(colbert, kit.unit(through("colbert", rows[1:])))
    reply = await client.post("/pooling", {"input": FEW, "task": "embed&token_classify"})
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, lists))
    for entry, dense, sparse in zip(reply.json()["data"], await vectors(client, FEW), weights, strict=True):
        close(np.array(entry["data"]), np.concatenate([dense, np.ravel(sparse)]))


async def test_scores_by_tokens_are_sums_of_the_largest_products(pooling):
    client = await pooling(kit.bge_m3())
    query, *documents = await pooled(client, [QUERY, *DOCUMENTS], "token_embed")
    wanted = [(query @ document.T).max(1).sum() for document in documents]
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS, task="token_embed")
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    cosine = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    assert cosine == await scores(client, text_1=QUERY, text_2=DOCUMENTS, task="embed") != found
    ranked = await client.post("/rerank", {"query": QUERY, "documents": DOCUMENTS, "task": "token_embed"})
    assert [entry["relevance_score"] for entry in ranked.json()["results"]] == sorted(found, reverse=True)
    assert (await client.post("/score", {"text_1": "x", "text_2": "y", "task": "token_classify"})).status == 400
    alone = await pooling(kit.embedder("qwen3"), pooler_config={"pooling_type": "ALL"})
    assert (await client.post("/pooling", {"input": "x", "task": "classify"})).status == 400
    query, *documents = await pooled(alone, [QUERY, *DOCUMENTS])
    found = await scores(alone, text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose(found, [(query @ document.T).max(1).sum() for document in documents], rtol=1e-5)


@pytest.mark.parametrize(("made", "words"), [(kit.pylate, "ea"), (kit.colbert, string.punctuation)])
async def test_a_colbert_marks_both_sides_and_leaves_punctuation_out_of_documents(pooling, made, words):
    client, hidden = await pooling(made()), kit.body_of(kit.encoder("bert"))
    weight = kit.load_file(kit.pylate() / "1_Dense" / "model.safetensors")["linear.weight"].numpy()
    vocabulary = kit.read(kit.pylate() / "tokenizer.json")["model"]["vocab"]
    skipped, texts = [vocabulary[word] for word in words], [*DOCUMENTS, "x, y!"]

    def through(ids, marker, document):
        ids = [ids[0], tiny.IDS[marker], *ids[1:]]
        rows = kit.unit(hidden(ids) @ weight.T)
        return rows[~np.isin(ids, skipped)] if document else rows

    first, *others = await ids_of(client, [QUERY, *texts])
    query = through(first, "<|vision_bos|>", False)
    documents = [through(ids, "<|vision_eos|>", True) for ids in others]
    assert sum(map(len, documents)) < sum(len(ids) + 1 for ids in others)  # punctuation is left out
    wanted = [(query @ document.T).max(1).sum() for document in documents]
    np.testing.assert_allclose(await scores(client, text_1=QUERY, text_2=texts), wanted, rtol=1e-4)
    close((await pooled(client, [QUERY], prompt_name="query"))[0], query)
    for found, document in zip(await pooled(client, texts, prompt_name="document"), documents):
        close(found, document)
    close((await pooled(client, [QUERY]))[0], kit.unit(hidden(first) @ weight.T))
    refused = await client.post("/v1/embeddings", {"input": "x"})
    assert (refused.status, "ask /pooling, /score or /rerank" in refused.error["message"]) == (501, True)
    refused = await client.post("/classify", {"input": "x"})
    assert (refused.status, refused.error["message"].endswith("ask /pooling")) == (501, True)


async def test_a_colbert_whose_markers_are_no_tokens_does_not_start():
    folder = kit.shutil.copytree(kit.colbert(), kit.home() / "colbert-without-marker")
    kit.write(folder / "artifact.metadata", {**kit.read(folder / "artifact.metadata"), "doc_token_id": "no token"})
    with pytest.raises(ConfigError, match="doc_token_id='no token' is no token"):
        load_model_config(folder)
    with pytest.raises(ConfigError, match="leave the flag out"):
        load_model_config(kit.colbert(), pooler={"pooling_type": "CLS"})


@pytest.mark.parametrize(
    ("file", "changes", "told"),
    [
        ("config_sentence_transformers.json", {"query_prefix": "[Q] "}, "query_prefix='\\[Q\\] ' is no token"),
        ("config_sentence_transformers.json", {"skiplist_words": "abc"}, "skiplist_words must be a list"),
        ("1_Dense/config.json", {"use_residual": True}, "use_residual=true is not supported"),
    ],
)
async def test_a_colbert_of_pylate_that_cannot_be_computed_does_not_start(tmp_path, file, changes, told):
    folder = kit.shutil.copytree(kit.pylate(), tmp_path / "pylate")
    kit.write(folder / file, {**kit.read(folder / file), **changes})
    with pytest.raises(ConfigError, match=told):
        load_model_config(folder)


async def test_queries_that_were_filled_up_with_mask_tokens_are_named_in_the_log(tmp_path, caplog):
    folder = kit.shutil.copytree(kit.pylate(), tmp_path / "pylate")
    said = kit.read(folder / "config_sentence_transformers.json")
    kit.write(folder / "config_sentence_transformers.json", {**said, "do_query_expansion": True})
    assert load_model_config(folder).pooling.markers == {
        "query": tiny.IDS["<|vision_bos|>"], "document": tiny.IDS["<|vision_eos|>"]
    }  # fmt: skip
    assert "do_query_expansion" in caplog.text


async def test_pickles_of_bge_m3_are_not_read_and_the_log_says_how_to_convert_them(tmp_path, caplog):
    folder = kit.shutil.copytree(kit.encoder("xlm_roberta"), tmp_path / "bge-m3")
    (folder / "sparse_linear.pt").write_bytes(b"pickle")
    assert load_model_config(folder).pooling.tasks == ("embed", "token_embed")
    assert f"python -m server convert {folder}" in caplog.text
