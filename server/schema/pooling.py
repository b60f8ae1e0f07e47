"""The bodies of /v1/embeddings, /pooling, /classify, /score and /rerank (API.md section 13)."""

from __future__ import annotations

from typing import Any

import msgspec

Sides = str | dict[str, Any] | list[str | dict[str, Any] | list[dict[str, Any]]]  # a text, an object with one, or many


class InputFields(msgspec.Struct, kw_only=True):
    """What all of these bodies take."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # refused: use_activation is the name
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    padding: bool | str | None = None  # nothing is padded here


class ClassifyBody(InputFields, kw_only=True):
    """`input`: a text, texts, token ids, lists of token ids, or objects of text or media; or else `messages`."""

    input: str | list[str | int | list[int] | dict[str, Any]] | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    prompt_name: str | None = None


class EmbeddingBody(ClassifyBody, kw_only=True):
    encoding_format: str | None = None
    dimensions: int | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    input_type: str | None = None  # what the texts are for, where no prompt_name says it


class VectorsBody(EmbeddingBody, kw_only=True):
    """Of /v1/embeddings; `task` is Jina's word for `input_type`."""

    task: str | None = None


class PoolingBody(EmbeddingBody, kw_only=True):
    """`task`: what is made of each input."""

    task: str | None = None


class ScoreBody(InputFields, kw_only=True):
    """The pairs under any of four pairs of names; a text or texts on each side."""

    text_1: Sides | None = None
    text_2: Sides | None = None
    queries: Sides | None = None
    documents: Sides | None = None
    items: Sides | None = None
    data_1: Sides | None = None
    data_2: Sides | None = None
    instruction: str | None = None
    task: str | None = None


class RerankBody(InputFields, kw_only=True):
    query: Sides
    documents: Sides
    top_n: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    return_documents: bool | None = None
    task: str | None = None
