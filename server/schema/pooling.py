"""The bodies of /v1/embeddings, /pooling, /classify, /score and /rerank (API.md section 13)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said

Sides = str | dict[str, Any] | list[str | dict[str, Any] | list[dict[str, Any]]]  # a text, an object, or a list of them


# Fields about the prompt of a conversation; without `messages` they are refused.
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


class InputFields(msgspec.Struct, kw_only=True):
    """The fields that all of these bodies share."""

    model: fields.Model = None
    truncate_prompt_tokens: Annotated[
        int | None, said("Most tokens of an input; a longer input is cut; -1 means the context length.")
    ] = None
    truncation_side: Annotated[str | None, said("The side on which a long input is cut: left or right.", "right")] = (
        None
    )
    add_special_tokens: Annotated[bool | None, said("Whether the tokenizer adds its special tokens to each input.")] = (
        None
    )
    use_activation: Annotated[
        bool | None,
        said("Whether results pass the model's last activation: norm of vectors, softmax or sigmoid of scores."),
    ] = None
    normalize: Annotated[bool | None, said("Refused; use_activation is the name.")] = None
    priority: fields.Priority = None
    cache_salt: fields.CacheSalt = None
    request_id: fields.RequestId = None
    user: Annotated[str | None, said("An identifier of the caller's user; accepted without effect.")] = None
    padding: Annotated[bool | str | None, said("Accepted without effect: inputs are not padded.")] = None
    add_generation_prompt: fields.EndsOpen = None
    continue_final_message: Annotated[bool | None, said("Whether the last message of messages stays open.")] = None
    chat_template: fields.ChatTemplate = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None


class ClassifyBody(InputFields, kw_only=True):
    """`input`: a text, texts, token ids, lists of token ids, or objects of text or media; or else `messages`."""

    input: Annotated[
        str | list[str | int | list[int] | dict[str, Any]] | None,
        said(
            "A text, texts, token ids, lists of token ids, or objects with text or media; or else messages.",
            "The film was good.",
        ),
    ] = None
    messages: Annotated[
        list[dict[str, Any]] | None, said("A conversation in place of input, rendered by the chat template.")
    ] = None
    prompt_name: Annotated[
        str | None, said("The name of the checkpoint's prompt that goes before each input.", "query")
    ] = None


class EmbeddingBody(ClassifyBody, kw_only=True):
    encoding_format: Annotated[str | None, said("The form of vectors: float, base64 or bytes.", "float")] = None
    dimensions: Annotated[int | None, said("Length of the vectors, of models that can shorten them.", 256)] = None
    embed_dtype: Annotated[str | None, said("The number format of base64 and bytes.", "float32")] = None
    endianness: Annotated[
        str | None, said("The byte order of base64 and bytes: little or native, which is little here.", "little")
    ] = None
    input_type: Annotated[str | None, said("The purpose of the inputs, where no prompt_name gives it.", "query")] = None


class VectorsBody(EmbeddingBody, kw_only=True):
    """The body of /v1/embeddings; `task` is Jina's word for `input_type`."""

    task: Annotated[
        str | None, said("The purpose of the inputs in Jina's terms, where no prompt_name gives it.", "retrieval.query")
    ] = None


class PoolingBody(EmbeddingBody, kw_only=True):
    """`task`: the kind of result for each input."""

    task: Annotated[
        str | None,
        said(
            "The result for each input: embed, classify, token_embed, token_classify or embed&token_classify.", "embed"
        ),
    ] = None


class ScoreBody(InputFields, kw_only=True):
    """The two sides of pairs under any of four pairs of names; a text or texts on each side."""

    text_1: Annotated[
        Sides | None,
        said("The first side of each pair: one input, or as many as the second side has.", "What is a cat?"),
    ] = None
    text_2: Annotated[Sides | None, said("The second side of each pair.", ["A cat is an animal.", "It rains."])] = None
    queries: Annotated[Sides | None, said("Another name of text_1.")] = None
    documents: Annotated[Sides | None, said("Another name of text_2.")] = None
    items: Annotated[Sides | None, said("Another name of text_2.")] = None
    data_1: Annotated[Sides | None, said("Another name of text_1.")] = None
    data_2: Annotated[Sides | None, said("Another name of text_2.")] = None
    instruction: fields.Instruction = None
    task: fields.ComparedBy = None


class RerankBody(InputFields, kw_only=True):
    query: Annotated[Sides, said("The text that documents are compared with.", "What is a cat?")]
    documents: Annotated[
        Sides,
        said("The documents to sort: texts, or objects with text or media.", ["A cat is an animal.", "It rains."]),
    ]
    top_n: Annotated[int | None, said("Number of documents to return, the best first; 0 means all.", 2)] = None
    max_tokens_per_doc: Annotated[int | None, said("Most tokens of a document; a longer document is cut.")] = None
    instruction: fields.Instruction = None
    return_documents: Annotated[bool | None, said("Whether results hold the documents.")] = None
    task: fields.ComparedBy = None
