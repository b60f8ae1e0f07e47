"""The operations of llama.cpp's protocol, for /openapi.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from server.dialects.llama_cpp import answers, schema
from server.openapi import TABLE, WORK, Operation

TAG = "llama.cpp"


def work(id: str, summary: str, body: type[msgspec.Struct], answer: Any, event: Any = None) -> Operation:
    return Operation(id, TAG, summary, answer, event, body, statuses=WORK)


def alias(id: str, method: str, path: str) -> Operation:
    """One of our own operations by another path."""
    return replace(TABLE[method, path], id=id, tag=TAG, summary=f"{path} by the path of llama.cpp")


COMPLETED = answers.LlamaCompletion | list[answers.LlamaCompletion]
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/completion"): work(
        "llama_completion", "Continue texts, in llama.cpp's protocol", schema.LlamaCompletionBody, COMPLETED,
        answers.LlamaCompletion,
    ),
    ("POST", "/completions"): work(
        "llama_completions", "The same by its other name", schema.LlamaCompletionBody, COMPLETED,
        answers.LlamaCompletion,
    ),
    ("POST", "/infill"): work(
        "llama_infill", "The text in a gap, for editors", schema.LlamaInfillBody, answers.LlamaCompletion,
        answers.LlamaCompletion,
    ),
    ("GET", "/props"): Operation("llama_props", TAG, "The model, its defaults and its template", answers.LlamaProps),
    ("GET", "/slots"): Operation("llama_slots", TAG, "The rows of a step", list[answers.LlamaSlot]),
    ("POST", "/apply-template"): work(
        "llama_apply_template", "The prompt of a conversation, as text", schema.LlamaTemplateBody,
        answers.LlamaTemplated,
    ),
    ("POST", "/embedding"): work(
        "llama_embedding", "Vectors of texts", schema.LlamaEmbeddingBody, list[answers.LlamaEmbedding]
    ),
    ("GET", "/v1/health"): alias("llama_health", "GET", "/health"),
    ("GET", "/models"): alias("llama_models", "GET", "/v1/models"),
    ("POST", "/chat/completions"): alias("llama_chat", "POST", "/v1/chat/completions"),
    ("POST", "/embeddings"): alias("llama_embeddings", "POST", "/v1/embeddings"),
    ("POST", "/reranking"): alias("llama_reranking", "POST", "/v1/rerank"),
    ("POST", "/v1/reranking"): alias("llama_reranking_v1", "POST", "/v1/rerank"),
}  # fmt: skip
