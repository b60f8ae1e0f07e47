"""The bodies of /tokenize, /detokenize (API.md section 16) and /abort_requests."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either `prompt`, or `messages` with their options, or llama.cpp's `content` with its options."""

    model: fields.Model = None
    prompt: Annotated[str | None, said("The text to tokenize; or else messages.", "Hello")] = None
    messages: Annotated[list[dict[str, Any]] | None, said("A conversation to render and tokenize.")] = None
    tools: Annotated[list[dict[str, Any]] | None, said("Tools for the chat template.")] = None
    add_special_tokens: fields.AddSpecialTokens = None
    return_token_strs: Annotated[bool | None, said("Whether the answer has the tokens as texts too.")] = None
    add_generation_prompt: fields.EndsOpen = None
    continue_final_message: Annotated[bool | None, said("Whether the last message stays open.")] = None
    chat_template: fields.ChatTemplate = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None
    content: Annotated[str | None, said("The text to tokenize, in the form of llama.cpp's clients.", "Hello")] = None
    add_special: Annotated[bool | None, said("With content: whether the tokenizer adds its special tokens.")] = None
    parse_special: Annotated[
        bool | None, said("With content: whether special tokens in the text are tokens; true where it is absent.")
    ] = None
    with_pieces: Annotated[bool | None, said("With content: whether tokens are objects with their texts.")] = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: fields.Model = None
    tokens: Annotated[list[int], said("The token ids.", [1, 2, 3])]


class AbortBody(msgspec.Struct, kw_only=True):
    request_ids: Annotated[
        list[str], said("Ids of requests or answers; ids that are not running are ignored.", ["chatcmpl-1"])
    ]
