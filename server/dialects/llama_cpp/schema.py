"""The bodies of llama.cpp's routes (https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said

Prompt = str | list[Any] | dict[str, Any]  # a text, ids, a mixed list, an object with prompt_string, or a list of these
NumPredict = Annotated[
    int | None, said("Most tokens to generate; -1 means the rest of the context, 0 only computes the prompt.", 16)
]


class LlamaFields(msgspec.Struct, kw_only=True):
    """The sampling fields of /completion and /infill."""

    model: fields.Model = None
    n_predict: NumPredict = None
    stream: fields.Stream = None
    temperature: fields.Temperature = None
    top_k: fields.TopK = None
    top_p: fields.TopP = None
    min_p: fields.MinP = None
    seed: fields.Seed = None
    stop: fields.Stop = None
    repeat_penalty: Annotated[
        float | None, said("Divides the logits of tokens of the prompt and the answer; 1 switches it off.", 1.1)
    ] = None
    repeat_last_n: Annotated[
        int | None, said("The window of repeat_penalty: -1 (the whole text) or 0 (off); others are refused.", -1)
    ] = None
    presence_penalty: fields.PresencePenalty = None
    frequency_penalty: fields.FrequencyPenalty = None
    ignore_eos: fields.IgnoreEos = None
    logit_bias: Annotated[
        list[list[int | float | bool | str]] | dict[str, float | bool] | None,
        said("Pairs of a token id or a text with a number from -100 to 100, or with false for never.", [[5, -1.5]]),
    ] = None
    grammar: Annotated[str | None, said("A grammar in GBNF or Lark that the answer matches.")] = None
    json_schema: Annotated[dict[str, Any] | None, said("A JSON schema that the answer matches.")] = None
    n_probs: Annotated[int | None, said("Number of likeliest tokens to report at each place.", 5)] = None
    return_progress: fields.ReturnProgress = None
    return_tokens: Annotated[bool | None, said("Whether the answer has the ids of its tokens.")] = None
    response_fields: Annotated[
        list[str] | None, said("The fields to answer with; a slash separates the names of nested fields.", ["content"])
    ] = None


class LlamaCompletionBody(LlamaFields, kw_only=True):
    """The body of /completion."""

    prompt: Annotated[
        Prompt, said("A text, token ids, a list of both, an object with prompt_string, or a list of these.", "1 2 3")
    ]


class LlamaFile(msgspec.Struct, kw_only=True):
    """Text of another file, for /infill."""

    filename: Annotated[str, said("The name of the file.", "a.py")]
    text: Annotated[str, said("The text.", "x = 1")]


class LlamaInfillBody(LlamaFields, kw_only=True):
    """The body of /infill."""

    input_prefix: Annotated[str, said("The text before the gap.", "def f(a):")]
    input_suffix: Annotated[str, said("The text after the gap.", "print(f(1))")]
    input_extra: Annotated[list[LlamaFile] | None, said("Text of other files, the most important last.")] = None
    prompt: Annotated[str | None, said("The beginning of the text in the gap.")] = None
    samplers: Annotated[Any, said("Accepted without effect: editors send names of llama.cpp's samplers.")] = None
    n_indent: Annotated[int | None, said("Accepted without effect: lines may have any indentation.")] = None
    t_max_prompt_ms: Annotated[int | None, said("Accepted without effect: a prompt is always computed.")] = None
    t_max_predict_ms: Annotated[
        int | None, said("The answer ends after the first line that is complete when so many milliseconds have passed.")
    ] = None


class LlamaEmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of /embedding."""

    content: Annotated[
        str | list[str | int | list[int]],
        said("A text, texts, token ids or lists of token ids.", "The film was good."),
    ]
    model: fields.Model = None
    embd_normalize: Annotated[
        int | None, said("The norm that is 1: 2 is Euclidean, the default; -1: none; 0: the greatest number is 32760.")
    ] = None


class LlamaTemplateBody(msgspec.Struct, kw_only=True):
    """The body of /apply-template."""

    messages: Annotated[
        list[dict[str, Any]], said("The conversation.", [{"role": "user", "content": "What is 12 + 30?"}])
    ]
    model: fields.Model = None
    tools: Annotated[list[dict[str, Any]] | None, said("Tools for the chat template.")] = None
    add_generation_prompt: fields.EndsOpen = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None
