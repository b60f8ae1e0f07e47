"""The operations of Ollama's protocol, for /openapi.json."""

from __future__ import annotations

from typing import Any

import msgspec

from server.dialects.ollama import answers, schema
from server.openapi import WORK, Operation

TAG = "Ollama"
LINES = "application/x-ndjson"
UNBUILT = (401, 403, 421, 501)


def work(id: str, summary: str, body: type[msgspec.Struct], answer: Any, event: Any = None) -> Operation:
    return Operation(id, TAG, summary, answer, event, body, statuses=WORK, stream=LINES)


def facts(id: str, summary: str, answer: Any) -> Operation:
    return Operation(id, TAG, summary, answer)


def refused(verb: str) -> Operation:
    return Operation(f"ollama_{verb}", TAG, "Refused: models are chosen at the start", statuses=UNBUILT)


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/api/chat"): work(
        "ollama_chat", "Answer a conversation, in Ollama's protocol", schema.OllamaChatBody, answers.OllamaChat,
        answers.OllamaChat,
    ),
    ("POST", "/api/generate"): work(
        "ollama_generate", "Answer or continue a text, in Ollama's protocol", schema.OllamaGenerateBody,
        answers.OllamaGenerated, answers.OllamaGenerated,
    ),
    ("POST", "/api/embed"): work(
        "ollama_embed", "Vectors of texts, in Ollama's protocol", schema.OllamaEmbedBody, answers.OllamaEmbedded
    ),
    ("POST", "/api/embeddings"): work(
        "ollama_embeddings", "The vector of a text, in Ollama's older form", schema.OllamaEmbeddingsBody,
        answers.OllamaEmbedding,
    ),
    ("POST", "/api/show"): work(
        "ollama_show", "Facts about a name, in Ollama's protocol", schema.OllamaShowBody, answers.OllamaShown
    ),
    ("GET", "/api/tags"): facts("ollama_tags", "The served names, in Ollama's protocol", answers.OllamaModels),
    ("GET", "/api/ps"): facts("ollama_ps", "The loaded names: all of them", answers.OllamaRunningModels),
    ("GET", "/api/version"): facts("ollama_version", "Ollama's version of the protocol", answers.OllamaVersion),
    **{("POST", f"/api/{verb}"): refused(verb) for verb in ("pull", "push", "create", "copy")},
    ("DELETE", "/api/delete"): refused("delete"),
    ("HEAD", "/api/blobs/{digest}"): refused("find_blob"),
    ("POST", "/api/blobs/{digest}"): refused("send_blob"),
}  # fmt: skip
