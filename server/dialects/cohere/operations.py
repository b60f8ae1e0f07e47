"""The operation of Cohere's /v2/embed, for /openapi.json."""

from __future__ import annotations

from server.dialects.cohere.schema import CohereEmbedBody, CohereEmbedded
from server.openapi import Operation, work

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v2/embed"): work(
        "cohere_embed", "Embeddings", "Vectors of texts and images, in Cohere's protocol", CohereEmbedBody,
        CohereEmbedded,
    ),
}  # fmt: skip
