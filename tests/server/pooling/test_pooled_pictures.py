"""Embedding decoders of pictures or audio: a conversation's vector is the last token's hidden state of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import engine.run.start
from mm.splice import splice
from server.pooling.conversations import JUDGE, VL_INSTRUCTION
from tests import pooling_kit as kit
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import answered
from tests.engine_kit import running
from tests.server.routes.test_seeing import BROKEN, FILM, OTHER, PICTURE, WORDS

pytestmark = pytest.mark.asyncio(loop_scope="session")
POOLS = {"runner": "pooling"}


def said(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}], "add_generation_prompt": True}


async def vector(client, path: str = "/v1/embeddings", **body) -> np.ndarray:
    answer = await client.post(path, body)
    assert answer.status == 200, answer.content
    return np.array([one.get("embedding", one.get("data")) for one in answer.json()["data"]], np.float32)


def reranker() -> Path:
    """Qwen3-VL as a reranker; the tiny tokenizer's letters y and n stand for yes and no."""
    values = {"architectures": ("Qwen3VLForSequenceClassification",), "classifier_from_token": kit.Words(["n", "y"])}
    return kit.changed(tiny.checkpoint("qwen3_vl"), "vl-reranker", is_original_qwen3_reranker=True, **values)


async def oracle_inputs(state, messages: list[dict]) -> dict:
    """transformers' arguments with our processor's pixels; transformers computes the positions."""
    prompt = await state.renderer.chat(messages, add_generation_prompt=True)
    processed = await state.media.load(prompt.media)
    made = splice(prompt.token_ids, prompt.slots, processed, state.media.processor)
    ids = torch.tensor(made.prompt_token_ids, dtype=torch.long)[None]
    marks = ids == tiny.IDS["<|IMAGE|>"], ids == tiny.IDS["<|VIDEO|>"]
    inputs = {"input_ids": ids, "mm_token_type_ids": marks[0].int() + 2 * marks[1].int()}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        features = [part.features for item in processed for part in item.parts if part.modality == kind]
        if features:
            inputs[pixels] = torch.tensor(np.concatenate([one["pixel_values"] for one in features]))
            inputs[f"{kind}_grid_thw"] = torch.tensor(np.concatenate([one["grid_thw"] for one in features]))
    return inputs


async def of_transformers(state, folder, *parts: dict) -> np.ndarray:
    """The last token's hidden state, computed by transformers and normalised."""
    inputs = await oracle_inputs(state, said(*parts)["messages"])
    model = tiny.reference(folder).model
    model.rope_deltas = None
    with torch.no_grad():
        return kit.unit(model(**inputs).last_hidden_state[0, -1].numpy())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
async def test_conversations_with_pictures_and_films_are_those_of_transformers(pooling, name):
    folder = tiny.checkpoint(name)
    client = await pooling(folder, **POOLS)
    for parts in ((PICTURE, WORDS), (WORDS,), (WORDS, OTHER, FILM, PICTURE)):
        wanted = [await of_transformers(client.state, folder, *parts)]
        for _ in range(2):  # the second run finds its blocks in the prefix cache
            kit.close(await vector(client, **said(*parts)), wanted)
    by_token = await vector(client, "/pooling", task="token_embed", **said(PICTURE, WORDS))
    kit.close(by_token[0][-1:], await vector(client, **said(PICTURE, WORDS)))
    assert (await vector(client, input=["the cat", "x"])).shape[0] == 2


async def test_conversations_that_cannot_be_seen_are_refused(pooling):
    client = await pooling(tiny.checkpoint("qwen3_vl"), **POOLS)
    long = {"type": "text", "text": "the bird " * 2000}
    for body, text in (
        (said(BROKEN, WORDS), "messages[0].content[0]"),
        (said(PICTURE, long), "maximum context length"),
        ({**said(PICTURE, WORDS), "truncate_prompt_tokens": 2}, "placeholder_mismatch"),
    ):
        answer = await client.post("/v1/embeddings", body)
        assert answer.status == 400, answer.content
        assert text in answer.content.decode(), answer.content

    refused = await client.post(
        "/v1/embeddings", {"input": [{"content": [PICTURE, WORDS]}], "truncate_prompt_tokens": 2}
    )
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")
    assert refused.error["message"].startswith("truncate_prompt_tokens: got 2; an input with media (input) takes ")


async def test_scores_of_an_embedder_are_cosines_of_its_vectors(pooling):
    client = await pooling(tiny.checkpoint("qwen3_vl"), **POOLS)
    items = [WORDS["text"], [PICTURE], [OTHER, WORDS], {"image": OTHER["image_url"]["url"]}, [WORDS]]
    made = [(await vector(client, input=WORDS["text"]))[0]] + [
        (await vector(client, **said(*parts)))[0] for parts in ((PICTURE,), (OTHER, WORDS), (OTHER,))
    ]
    wanted = np.stack([*made, made[0]])
    kit.close(await vector(client, input=[items[0], *({"content": one} for one in items[1:3]), *items[3:4]]), made)
    both = {"image": OTHER["image_url"]["url"], "text": WORDS["text"]}
    kit.close(await vector(client, input=[both]), made[2:3])
    answer = await client.post("/score", {"queries": [PICTURE], "documents": items})
    assert answer.status == 200, answer.content
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], wanted @ made[1], atol=1e-5)
    answer = await client.post("/rerank", {"query": [OTHER, WORDS], "documents": items, "top_n": 2})
    best = sorted(range(5), key=lambda at: -(wanted @ made[2])[at])[:2]
    results = answer.json()["results"]
    assert [one["index"] for one in results] == best
    assert results[0]["document"] == {"text": WORDS["text"]}  # the document's text, without its picture
    assert answer.json()["usage"]["prompt_tokens"] > 40
    for documents, param in (([[PICTURE], [BROKEN]], "documents[1]"), ([PICTURE] * 65, "documents")):
        refused = await client.post("/rerank", {"query": "x", "documents": documents})
        assert refused.status == 400, refused.content
        assert param in refused.error["param"]


async def test_a_reranker_that_sees_has_its_models_own_conversation(pooling):
    """The prompt is from Qwen3-VL-Reranker's card; the score is the sigmoid of transformers' logits of yes minus no."""
    folder = tiny.checkpoint("qwen3_vl")
    client = await pooling(reranker())
    model, encode = tiny.reference(folder), client.state.tokenizer.encode
    yes, no = encode("y")[0], encode("n")[0]

    async def wanted(task, query, document):
        """transformers' score; `query` and `document` are lists of content parts."""
        parts = [{"type": "text", "text": f"<Instruct>: {task}"}, {"type": "text", "text": "<Query>:"}, *query]
        parts += [{"type": "text", "text": "\n<Document>:"}, *document]
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": parts}]
        inputs = await oracle_inputs(client.state, messages)
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        return float((logits[yes] - logits[no]).sigmoid())

    pairs = [([WORDS], [PICTURE]), ([WORDS], [WORDS]), ([WORDS], [OTHER, WORDS])]
    body = {"query": WORDS["text"], "documents": [[PICTURE], WORDS["text"], [OTHER, WORDS]]}
    for more, task in (({}, VL_INSTRUCTION), ({"instruction": "Judge"}, "Judge")):
        answer = await client.post("/score", {"queries": body["query"], "documents": body["documents"], **more})
        assert answer.status == 200, answer.content
        found = [one["score"] for one in answer.json()["data"]]
        np.testing.assert_allclose(found, [await wanted(task, *pair) for pair in pairs], atol=1e-4)
    answer = await client.post("/rerank", {"query": [PICTURE], "documents": body["documents"]})
    assert len(answer.json()["results"]) == 3


async def test_an_embedder_of_messages_makes_one_of_each_text(pooling):
    """sentence-transformers does the same if the checkpoint's files ask for it; a prompt becomes the system message."""
    folder, texts = kit.of_messages(), kit.TEXTS
    client = await pooling(folder)
    model = kit.oracle(folder)
    queries, documents = (model.encode(texts, prompt_name=name) for name in ("query", "document"))
    assert (
        np.abs(queries - kit.oracle(kit.embedder("qwen3", prompts=True)).encode(texts, prompt_name="query")).max() > 0.1
    )
    kit.close(await vector(client, input=texts, prompt_name="query"), queries)
    kit.close(await vector(client, input=texts), documents)
    system = {"role": "system", "content": kit.PREFIX["query"]}
    kit.close(await vector(client, messages=[system, {"role": "user", "content": texts[0]}]), queries[:1])
    answer = await client.post("/score", {"queries": texts[0], "documents": texts})
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], documents @ queries[0], atol=1e-5)
    long = "a b c d " * 60
    refused = await client.post("/v1/embeddings", {"input": ["x", long]})
    assert (refused.status, refused.error["param"]) == (400, "input[1]")
    cut = await client.post("/v1/embeddings", {"input": ["x", long], "truncate_prompt_tokens": 50})
    assert cut.json()["usage"]["prompt_tokens"] <= 100
    refused = await client.post("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 2})
    assert refused.status == 400


async def test_the_device_path_sees_the_same(pooling, monkeypatch):
    """The server's request, sent to an engine with an accelerator's steps."""
    folder, asked = tiny.checkpoint("qwen3_vl"), []
    client = await pooling(folder, **POOLS)
    submit = client.state.engine.submit
    monkeypatch.setattr(client.state.engine, "submit", lambda request: asked.append(request) or submit(request))
    documents = [WORDS["text"], [WORDS, PICTURE], [FILM]]
    assert (await client.post("/score", {"queries": [OTHER], "documents": documents})).status == 200
    wanted = await answered(client.state.engine, asked[0])
    monkeypatch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
    few = {"max_num_seqs": 4, "max_num_queued_reqs": 4, "max_num_batched_tokens": 64, "encoder_cache_tokens": 64}
    for settings in ({}, {"enforce_eager": True}):
        async with running(folder, **POOLS, **few, **settings) as served:
            for one, other in zip(await answered(served, asked[0]), wanted):
                np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)
