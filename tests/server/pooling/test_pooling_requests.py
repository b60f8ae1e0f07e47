"""Requests by users who have not read our pages: too long, truncated to nothing, or with other servers' names."""

from __future__ import annotations

import numpy as np
import pytest

from tests import pooling_kit as kit
from tests.asked_vectors import DOCUMENTS, QUERY, scores, vectors
from tests.server.pooling.test_rerank import PATHS, two_tokens

pytestmark = pytest.mark.asyncio(loop_scope="session")
LIMIT = 128  # tokens of the models' context; a text with more than 16 bytes for each token is not tokenized as a whole
LONG = "".join(f"{number:x} the bird " for number in range(4000))
BLANK = "\u3000" * 4000 + LONG  # some tokenizers make too few tokens of its beginning


def rerankers():
    return {
        "vectors": kit.embedder("bert", "mean_tokens"),
        "pair": kit.encoder("xlm_roberta", 1),
        "two tokens": two_tokens(is_original_qwen3_reranker=True),
        "chat": kit.logit_score(kit.PAIR_TEMPLATE, True),
    }


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("text", [LONG, BLANK])
async def test_a_text_of_any_length_is_cut_where_that_is_asked_for(pooling, side, text):
    client = await pooling(kit.embedder("bert", "mean_tokens"))
    encode = client.state.tokenizer.encode
    ids = encode(text, add_special_tokens=False)
    assert len(text) > 16 * LIMIT
    for asked, most in ((-1, LIMIT), (20, 20)):
        own = most - 2
        kept = [*ids[:own]] if side == "right" else [*ids[-own:]]
        before, after = client.state.frames.single
        wanted = await vectors(client, [*before, *kept, *after])
        found = await vectors(client, text, truncate_prompt_tokens=asked, truncation_side=side)
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    refused = await client.post("/v1/embeddings", {"input": ["x", text]})
    assert (refused.status, refused.error["param"]) == (400, "input[1]")
    assert refused.error["message"].startswith(f"This model's maximum context length is {LIMIT} tokens.")


@pytest.mark.parametrize("kind", list(rerankers()))
async def test_documents_of_any_length_are_cut_where_that_is_asked_for(pooling, kind):
    client = await pooling(rerankers()[kind])
    limit, once = client.state.engine.max_model_len, {"text_1": QUERY}
    short = LONG[: 10 * limit]
    assert len(LONG) > 16 * limit
    for asked in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": limit - 2}):
        wanted = await scores(client, **once, text_2=[*DOCUMENTS, short], **asked)
        found = await scores(client, **once, text_2=[*DOCUMENTS, LONG], **asked)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    for path in PATHS:
        body = {"query": QUERY, "documents": [LONG, short], "max_tokens_per_doc": 6}
        one, other = (entry["relevance_score"] for entry in (await client.post(path, body)).json()["results"])
        assert one == pytest.approx(other, abs=1e-5)
    refused = await client.post("/rerank", {"query": QUERY, "documents": [LONG, "x"]})
    assert (refused.status, refused.error["param"]) == (400, "documents[0]")
    assert refused.error["reason"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["pair", "two tokens", "chat"])
async def test_the_error_of_a_query_that_is_never_cut_says_so(pooling, kind):
    client = await pooling(rerankers()[kind])
    for query in ("a b c d " * 200, LONG):
        for asked in ({}, {"truncate_prompt_tokens": -1}):
            refused = await client.post("/score", {"queries": query, "documents": "x", **asked})
            assert (refused.status, refused.error["param"]) == (400, "queries")
            assert "is never cut" in refused.error["message"]
            assert "truncate_prompt_tokens" not in refused.error["message"]
    refused = await client.post("/rerank", {"query": QUERY, "documents": ["x"], "truncate_prompt_tokens": 5})
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")
    least = int(refused.error["message"].rpartition(" ")[2])
    for asked, status in ((least - 1, 400), (least, 200)):
        body = {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": asked}
        assert (await client.post("/rerank", body)).status == status


async def test_a_cut_that_leaves_no_text_is_refused(pooling):
    client = await pooling(kit.encoder("bert", 3))
    for given in ("the cat", ["x", "the cat"]):
        for asked in (0, 1, 2):
            refused = await client.post("/classify", {"input": given, "truncate_prompt_tokens": asked})
            assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")
            assert f"got {asked}; " in refused.error["message"]
            assert refused.error["message"].endswith("so send at least 3")
    assert (await client.post("/classify", {"input": "the cat", "truncate_prompt_tokens": 3})).status == 200
    refused = await client.post("/classify", {"input": [5, 6], "truncate_prompt_tokens": 0})
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", PATHS)
async def test_documents_may_be_one_as_vllm_takes_it(pooling, path):
    client = await pooling(kit.encoder("xlm_roberta", 1))
    (wanted,) = await scores(client, text_1=QUERY, text_2="the cat")
    for one in ("the cat", ["the cat"], {"text": "the cat"}, {"content": [{"type": "text", "text": "the cat"}]}):
        answer = (await client.post(path, {"query": QUERY, "documents": one})).json()
        (result,) = answer["results"]
        assert (result["index"], result["document"]) == (0, {"text": "the cat"})
        assert result["relevance_score"] == pytest.approx(wanted, abs=1e-6)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SAID = [
    ("/rerank", {"query": "x", "documents": ["x", {}]}, "documents[1]", "got an empty object"),
    ("/rerank", {"query": "x", "documents": [{"title": "x", "body": "y"}]}, "documents", "an object with title, body"),
    ("/rerank", {"query": "x", "documents": ["x", {"image": "x"}]}, "documents[1]", "type image; this model takes"),
    ("/rerank", {"query": "x", "documents": ["x", [PICTURE]]}, "documents[1]", "type image_url; this model takes"),
    ("/rerank", {"query": [PICTURE], "documents": ["x"]}, "query", "type image_url; this model takes text only"),
    ("/rerank", {"query": "x", "documents": [{"text": 5}]}, "documents", "got an object with text"),
    ("/rerank", {"query": "x", "documents": 5}, "documents", "got an integer; must be a string or an object or a list"),
    ("/v1/embeddings", {"input": ["x", {"image": "x"}]}, "input[1]", "type image; this model takes text only"),
    ("/v1/embeddings", {"input": "x", "encoding_format": ""}, "encoding_format", "must be one of float, base64, bytes"),
    ("/v1/embeddings", {"input": "x", "embed_dtype": ""}, "embed_dtype", "got an empty text; must be one of float32"),
    ("/pooling", {"input": "x", "task": ""}, "task", "must be one of embed, classify"),
    ("/score", {"text_1": "x"}, "text_2", "text_2: is missing, the other side of text_1"),
    ("/score", {"data_2": ["x"]}, "data_1", "data_1: is missing, the other side of data_2"),
    ("/score", {"text_1": "", "text_2": "x"}, "text_1", "text_1: has no tokens"),
    ("/score", {"queries": ["x", ""], "items": ["x", "x"]}, "queries[1]", "queries[1]: has no tokens"),
]


@pytest.mark.parametrize(("path", "body", "param", "text"), SAID)
async def test_what_was_got_and_what_is_allowed_is_said(pooling, path, body, param, text):
    client = await pooling(kit.embedder("qwen3"))
    refused = await client.post(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error
    assert text in refused.error["message"]


async def test_a_text_is_counted_that_has_more_tokens_than_the_context(pooling):
    client = await pooling(kit.embedder("bert", "mean_tokens"))
    text = "a b c d " * 50
    body = (await client.post("/tokenize", {"prompt": text})).json()
    assert body["count"] == len(body["tokens"]) == len(client.state.tokenizer.encode(text)) + 2
    assert body["count"] > body["max_model_len"] == LIMIT
    refused = await client.post("/tokenize", {"prompt": LONG})
    assert (refused.status, refused.error["reason"]) == (400, "context_length_exceeded")
    assert f"at most {16 * LIMIT} are counted" in refused.error["message"]


async def test_a_text_that_hardly_has_tokens_is_refused_rather_than_tokenized_to_its_end(pooling, monkeypatch):
    client = await pooling(kit.embedder("bert", "mean_tokens"))
    encode, sizes = client.state.tokenizer.encode, []

    def without_blanks(text, *more):
        sizes.append(len(text))
        return encode(text.replace(" ", ""), *more)

    monkeypatch.setattr(type(client.state.tokenizer), "encode", staticmethod(without_blanks))
    refused = await client.post("/v1/embeddings", {"input": " " * 10**6 + "x", "truncate_prompt_tokens": -1})
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert "leave out white space" in refused.error["message"]
    assert max(sizes) == 16 * 16 * LIMIT
