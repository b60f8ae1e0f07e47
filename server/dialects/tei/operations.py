"""The operations of text-embeddings-inference, for /openapi.json."""

from __future__ import annotations

from dataclasses import replace

from server.dialects.tei import schema as tei
from server.openapi import Operation, work
from server.schema.answers_pooling import RankedList

_TABLE: dict[tuple[str, str], Operation] = {
    ("POST", "/embed"): work(
        "tei_embed", "Embeddings", "Vectors of texts, in the protocol of text-embeddings-inference", tei.TeiEmbedBody,
        list[list[float]],
    ),
    ("POST", "/embed_all"): work(
        "tei_embed_all", "Embeddings", "Vectors of the tokens of texts, in that protocol", tei.TeiTokensBody,
        list[list[list[float]]],
    ),
    ("POST", "/embed_sparse"): work(
        "tei_embed_sparse", "Embeddings", "Weights of the vocabulary, in that protocol", tei.TeiTokensBody,
        list[list[tei.TeiWeight]],
    ),
    ("POST", "/predict"): work(
        "tei_predict", "Embeddings", "Classes of texts, in that protocol", tei.TeiPredictBody,
        list[tei.TeiLabel | list[tei.TeiLabel]],
    ),
    ("POST", "/rerank"): work(
        "rerank", "Embeddings", "Documents by how well they answer a query; with texts in that protocol",
        tei.SharedRerankBody, RankedList | list[tei.TeiRank],
    ),
    ("GET", "/info"): Operation("tei_info", "Models", "Facts about a model that pools, in that protocol", tei.TeiInfo),
}  # fmt: skip
# 424: the model cannot do what is asked.
OPERATIONS = {line: replace(operation, statuses=(*operation.statuses, 424)) for line, operation in _TABLE.items()}
