"""Helpers that request vectors and scores over HTTP. GPU tests use them too, so no client library is imported."""

from __future__ import annotations

import numpy as np

from tests.pooling_kit import TEXTS

FEW = [text for text in TEXTS if text]
QUERY = "which bird"
DOCUMENTS = ["the dog and the cat", "a bird in the land", "x", "the birds and the birds there", "x"]


async def ids_of(client, texts):
    return [client.state.tokenizer.encode(text, True) for text in texts]


async def vectors(client, inputs, **fields):
    answer = await client.post("/v1/embeddings", {"input": inputs, **fields})
    assert answer.status == 200, answer.content
    return np.array([entry["embedding"] for entry in answer.json()["data"]], np.float32)


async def scores(client, path="/score", **body):
    answer = await client.post(path, body)
    assert answer.status == 200, answer.content
    return [entry["score"] for entry in answer.json()["data"]]
