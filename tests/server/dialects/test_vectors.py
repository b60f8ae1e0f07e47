"""text-embeddings-inference, Cohere's /v2/embed and SageMaker's /invocations against the answers of our own routes."""

from __future__ import annotations

import base64

import cohere
import httpx
import numpy as np
import pytest

from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores, vectors
from tests.server.live import listening, picture
from tests.server.pooling.test_splade import checkpoint as splade

pytestmark = pytest.mark.asyncio(loop_scope="session")


def close(found, wanted):
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-6)


LONG = "a b c d " * 60


async def post(client, path, body, status=200, **named):
    reply = await client.post(path, body, **named)
    assert reply.status == status, reply.content
    return reply.json()


async def embedder(pooling):
    return await pooling(kit.changed(kit.embedder("qwen3", prompts=True), "tei", is_matryoshka=True))


async def test_embed_gives_the_vectors_of_v1(pooling):
    client = await embedder(pooling)
    wanted = await vectors(client, FEW)
    close(await post(client, "/embed", {"inputs": FEW}), wanted)
    close(await post(client, "/embed", {"inputs": FEW[0]}), wanted[:1])
    ids = await ids_of(client, FEW[:2])
    close(await post(client, "/embed", {"inputs": ids}), await vectors(client, ids))
    named = await post(client, "/embed", {"inputs": FEW, "prompt_name": "query"})
    close(named, await vectors(client, FEW, prompt_name="query"))
    short = np.array(await post(client, "/embed", {"inputs": FEW, "dimensions": 8}))
    np.testing.assert_allclose(short, await vectors(client, FEW, dimensions=8), atol=1e-6)
    raw = np.array(await post(client, "/embed", {"inputs": FEW, "normalize": False}))
    close(raw.astype(np.float32), await vectors(client, FEW, use_activation=False))


async def test_long_inputs_are_refused_or_cut_on_a_side(pooling):
    client = await embedder(pooling)
    reply = await client.post("/embed", {"inputs": ["x", LONG]})
    assert reply.status == 413
    assert reply.json()["error_type"] == "Validation"
    assert "inputs[1]" in reply.json()["error"]
    for side in ("left", "Right"):
        cut = await post(client, "/embed", {"inputs": LONG, "truncate": True, "truncation_direction": side})
        limits = {"truncate_prompt_tokens": -1, "truncation_side": side.lower()}
        close(cut, await vectors(client, LONG, **limits))


async def test_all_tokens_have_vectors(pooling):
    client = await embedder(pooling)
    found = await post(client, "/embed_all", {"inputs": FEW[:2]})
    body = {"input": FEW[:2], "task": "token_embed", "use_activation": False}
    wanted = (await post(client, "/pooling", body))["data"]
    for one, other in zip(found, wanted, strict=True):
        close(one, other["data"])
    assert "inputs[1]" in (await post(client, "/embed_all", {"inputs": ["x", LONG]}, 413))["error"]


async def test_sparse_weights_are_those_above_zero(pooling):
    client = await pooling(splade("bert"))
    wanted = await vectors(client, FEW[:3])
    found = await post(client, "/embed_sparse", {"inputs": FEW[:3]})
    for line, entries in zip(wanted, found, strict=True):
        dense = np.zeros_like(line)
        dense[[entry["index"] for entry in entries]] = [entry["value"] for entry in entries]
        close(dense, line)
        assert all(entry["value"] > 0 for entry in entries)
    assert "ask /embed_sparse" in (await post(client, "/embed", {"inputs": "a"}, 424))["error"]
    assert (await post(await embedder(pooling), "/embed_sparse", {"inputs": "a"}, 424))["error_type"] == "Backend"


async def test_classes_come_the_likeliest_first(pooling):
    client = await pooling(kit.classifier("qwen3", "Qwen3ForSequenceClassification", 3))
    wanted = (await post(client, "/classify", {"input": FEW[:2]}))["data"]
    single = await post(client, "/predict", {"inputs": FEW[0]})
    assert single[0]["label"] == wanted[0]["label"]
    close([entry["score"] for entry in single], sorted(wanted[0]["probs"], reverse=True))
    batch = await post(client, "/predict", {"inputs": [[text] for text in FEW[:2]]})
    assert [entries[0]["label"] for entries in batch] == [one["label"] for one in wanted]
    raw = await post(client, "/predict", {"inputs": [FEW[0]], "raw_scores": True})
    logits = np.array([entry["score"] for entry in raw])
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(), [entry["score"] for entry in single], atol=1e-6)
    for inputs in (["a", "b"], [["a", "b"]], [["a"], "b"], [1, 2]):
        assert "a batch as a list of lists" in (await post(client, "/predict", {"inputs": inputs}, 422))["error"]
    assert "has embed" in (await post(await embedder(pooling), "/predict", {"inputs": "a"}, 424))["error"]


async def test_texts_are_ranked_with_the_scores_of_documents(pooling):
    client = await pooling(kit.encoder("bert", labels=1))
    found = await scores(client, text_1=QUERY, text_2=DOCUMENTS)
    order = sorted(range(len(found)), key=lambda at: (-found[at], at))
    body = {"query": QUERY, "texts": DOCUMENTS}
    assert await post(client, "/rerank", body) == [{"index": at, "score": found[at]} for at in order]
    texts = await post(client, "/rerank", {**body, "return_text": True})
    assert [entry["text"] for entry in texts] == [DOCUMENTS[at] for at in order]
    raw = await post(client, "/rerank", {**body, "raw_scores": True})
    logits = {entry["index"]: entry["score"] for entry in raw}
    assert logits == dict(enumerate(await scores(client, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)))
    documents = await post(client, "/rerank", {"query": QUERY, "documents": DOCUMENTS})
    assert [entry["index"] for entry in documents["results"]] == order
    cut = await post(client, "/rerank", {"query": QUERY, "texts": [LONG, "x"], "truncate": True})
    assert len(cut) == 2
    left = {"query": QUERY, "texts": [LONG], "truncate": True, "truncation_direction": "left"}
    assert await post(client, "/rerank", left) != [entry for entry in cut if entry["index"] == 0]


async def test_the_body_decides_which_protocol_refuses(pooling):
    client = await pooling(kit.encoder("bert", labels=1))
    long = await post(client, "/rerank", {"query": QUERY, "texts": ["x", LONG]}, 413)
    assert "texts[1]" in long["error"]
    both = {"query": QUERY, "texts": ["a"], "documents": ["a"]}
    assert "not together with texts" in (await post(client, "/rerank", both, 422))["error"]
    none = await post(client, "/rerank", {"query": QUERY}, 400)
    assert "documents: is missing" in none["error"]["message"]
    for name in ("raw_scores", "return_text", "truncate", "truncation_direction"):
        value = "left" if name == "truncation_direction" else True
        reply = await post(client, "/rerank", {"query": QUERY, "documents": ["a"], name: value}, 400)
        assert f"{name}: goes with texts" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/embed", {}, 422, "inputs: is missing"),
        ("/embed", {"inputs": []}, 422, "inputs: is empty"),
        ("/embed", {"inputs": ["a", [1]]}, 422, "inputs[1]: mixes texts and token ids"),
        ("/embed", {"inputs": [["a"]]}, 422, "inputs: lists in a list must hold token ids"),
        ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "prompt_name: got none"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "truncation_direction: got up"),
        ("/embed", {"inputs": "a", "dimensions": 9999}, 422, "dimensions: got 9999"),
        ("/embed_all", {"inputs": [[999999]]}, 422, "inputs: token id 999999 is out of range"),
    ],
)
async def test_errors_have_the_form_and_the_names_of_this_protocol(pooling, path, body, status, text):
    reply = await post(await embedder(pooling), path, body, status)
    assert reply["error_type"] == "Validation"
    assert text in reply["error"], reply["error"]


async def test_a_busy_server_and_the_other_kind_of_model_have_their_own_words(pooling, client):
    other = await post(client, "/embed", {"inputs": "a"}, 424)
    assert other == {
        "error": "the served model generates text; it makes no embeddings, classes or scores",
        "error_type": "Backend",
    }
    assert (await client.get("/info")).status == 424
    busy = await embedder(pooling)
    with busy.state.places.hold(busy.state.places.limit if hasattr(busy.state.places, "limit") else 80, "other"):
        assert (await post(busy, "/embed", {"inputs": "a"}, 429))["error_type"] == "Overloaded"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: kit.embedder("qwen3"), {"embedding": {"pooling": "last_token"}}),
        (lambda: splade("bert"), {"embedding": {"pooling": "splade"}}),
        (lambda: kit.encoder("bert", labels=1), "reranker"),
        (lambda: kit.classifier("qwen3", "Qwen3ForSequenceClassification", 3), "classifier"),
    ],
)
async def test_info_says_what_the_model_is(pooling, make, kind):
    client = await pooling(make())
    found = (await client.get("/info")).json()
    assert found["model_id"] == client.state.names[0]
    assert found["max_input_length"] == client.state.engine.max_model_len
    assert found["model_dtype"] == "float32"
    assert found["model_type"] == kind or list(found["model_type"]) == [kind]
    if kind == "classifier":
        assert found["model_type"][kind]["id2label"]["1"] == "kind 1"


async def test_a_body_needs_no_content_type_unless_a_page_sends_it(serve):
    client = serve(server={"allowed_origins": ("http://page",)})
    for path, body in (("/v1/systemone", ASKED), ("/v1/score", INVOKED[3][1]), ("/invocations", INVOKED[1][1])):
        for headers in ({"content-type": "application/x-www-form-urlencoded"}, {"content-type": ""}):
            assert await post(client, path, body, headers=headers)
            await post(client, path, body, 415, headers={**headers, "origin": "http://page"})
    await post(client, "/v1/completions", INVOKED[1][1], 415, headers={"content-type": ""})


async def test_coheres_client_gets_every_form(pooling):
    client = await embedder(pooling)
    wanted = await vectors(client, FEW, input_type="search_query")
    async with listening(client) as url, httpx.AsyncClient() as http:
        speaker = cohere.AsyncClientV2("none", base_url=url, httpx_client=http)
        made = await speaker.embed(
            model=client.state.names[0], texts=FEW, input_type="search_query",
            embedding_types=["float", "int8", "uint8", "binary", "ubinary", "base64"],
        )  # fmt: skip
        short = await speaker.embed(model=client.state.names[0], texts=FEW, input_type="clustering", output_dimension=8)
    found = made.embeddings
    close(np.array(found.float_, np.float32), wanted)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found.base64]
    close(decoded, wanted)
    scaled = np.round(127 * wanted / np.abs(wanted).max(axis=1, keepdims=True))
    close(found.int8, scaled)
    close(found.uint8, scaled + 128)
    signs = [
        [sum((x > 0) << (7 - at) for at, x in enumerate(line[k : k + 8])) for k in range(0, len(line), 8)]
        for line in wanted
    ]
    close(found.ubinary, signs)
    close(found.binary, np.array(signs) - 128)
    assert made.texts == FEW
    assert made.meta.billed_units.input_tokens > 0
    assert {len(line) for line in short.embeddings.float_} == {8}


async def test_cohere_cuts_at_the_end_unless_asked_otherwise(pooling):
    client = await embedder(pooling)

    async def embed(status=200, **fields):
        return await post(client, "/v2/embed", {"texts": [LONG], **fields}, status)

    for truncate, side in ((None, "right"), ("END", "right"), ("START", "left")):
        found = (await embed(truncate=truncate))["embeddings"]["float"]
        limits = {"truncate_prompt_tokens": -1, "truncation_side": side}
        close(found, await vectors(client, LONG, **limits))
    short = (await embed(max_tokens=9))["embeddings"]["float"]
    close(short, await vectors(client, LONG, truncate_prompt_tokens=9, truncation_side="right"))
    assert (await embed(400, truncate="NONE"))["error"]["reason"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "texts: send exactly one of texts, images and inputs"),
        ({"texts": ["a"], "images": ["b"]}, "got texts and images"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types[0]: got int4"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types: is empty"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate: got MIDDLE"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "max_tokens: got 3"),
        ({"texts": ["a"], "input_type": "song"}, "input_type: got song"),
        ({"texts": ["a"], "output_dimension": 9999}, "output_dimension: got 9999"),
        ({"texts": ["a"], "priority": 4}, "priority: got 4"),
        ({"images": ["data:image/png;base64,aa"]}, "images"),
    ],
)
async def test_cohere_is_refused_by_its_own_names(pooling, body, text):
    reply = await post(await embedder(pooling), "/v2/embed", body, 400)
    assert text in reply["error"]["message"], reply["error"]["message"]


async def test_cohere_embeds_images_and_mixed_inputs(pooling):
    client = await pooling(tiny.checkpoint("qwen3_vl"), runner="pooling")
    url = f"data:image/png;base64,{picture()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    alone = await post(client, "/v2/embed", {"images": [url]})
    same = await post(client, "/v2/embed", {"inputs": [{"content": [part]}]})
    close(alone["embeddings"]["float"], same["embeddings"]["float"])
    mixed = await post(client, "/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "red"}, part]}]})
    assert mixed["embeddings"]["float"] != alone["embeddings"]["float"]


ASKED = {"state": "a", "questions": {"b": {"type": "score", "instructions": "c", "criteria": ["low", "high"]}}}
INVOKED = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "temperature": 0}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/score", {"query": "hi", "items": ["a"], "label_token_ids": [5]}),
]
CHANGING = ("id", "created", "created_at", "completed_at", "output", "usage")


@pytest.mark.parametrize(("path", "body"), INVOKED)
async def test_an_invocation_is_the_route_that_its_fields_choose(client, path, body):
    body = {**body, "temperature": 0} if "query" not in body else body
    headers = {"x-amzn-sagemaker-custom-attributes": "a", "content-type": "application/octet-stream"}
    found = await post(client, "/invocations", body, headers=headers)
    wanted = await post(client, path, body)
    assert {**found, **dict.fromkeys(CHANGING)} == {**wanted, **dict.fromkeys(CHANGING)}


async def test_invocations_of_models_that_pool(pooling, client):
    texts, ranker = await embedder(pooling), await pooling(kit.encoder("bert", labels=1))
    classes = await pooling(kit.classifier("qwen3", "Qwen3ForSequenceClassification", 3))
    wanted = await vectors(texts, FEW)
    found = await post(texts, "/invocations", {"input": FEW})
    close([one["embedding"] for one in found["data"]], wanted)
    close(await post(texts, "/invocations", {"inputs": FEW}), wanted)
    ranked = await post(ranker, "/invocations", {"query": QUERY, "texts": DOCUMENTS})
    assert ranked == await post(ranker, "/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert (await post(classes, "/invocations", {"input": FEW[:1]}))["data"][0]["num_classes"] == 3
    assert await post(classes, "/invocations", {"inputs": FEW[0]}) == await post(
        classes, "/predict", {"inputs": FEW[0]}
    )
    assert await post(await pooling(splade("bert")), "/invocations", {"inputs": "a"})
    assert (await post(texts, "/invocations", {"prompt": "a"}, 501))["error"]["reason"] == "not_implemented"
    assert "but this model generates" in (await post(client, "/invocations", {"inputs": "a"}, 501))["error"]["message"]


async def test_an_invocation_streams_and_fails_as_its_route_does(client, pooling):
    reply = await client.post("/invocations", {"prompt": "hi", "max_tokens": 3, "stream": True})
    assert reply.reply_headers["content-type"].startswith("text/event-stream")
    assert reply.events()[-1] == "[DONE]"
    for body in ({}, {"prompt": "a", "messages": []}):
        error = (await post(client, "/invocations", body, 400))["error"]
        assert "exactly one of messages, prompt, input" in error["message"]
    assert (await post(client, "/invocations", {"prompt": "a", "max_tokens": 0}, 400))["error"]["param"] == "max_tokens"
    assert "inputs[1]" in (await post(await embedder(pooling), "/invocations", {"inputs": ["x", LONG]}, 413))["error"]
    reply = await client.call("POST", "/invocations", body=b'{"prompt": ').finish()
    assert (reply.status, reply.error["reason"]) == (400, "invalid_json")
    assert client.state.body_budget.used == 0


async def test_a_large_invocation_is_read_in_the_pool(client):
    ids = [5] * 100_000
    reply = await client.post("/invocations", {"prompt": ids, "max_tokens": 1})
    assert reply.error["reason"] == "context_length_exceeded"
