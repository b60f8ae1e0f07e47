"""The bodies of Ollama's routes (https://github.com/ollama/ollama/blob/main/docs/api.md)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema.fields import ReturnProgress, said

Name = Annotated[
    str | None, said("The served name, with or without :latest; the first name where it is absent.", "qwen3-8b")
]
Options = Annotated[
    dict[str, Any] | None,
    said("Sampling options in Ollama's names, such as num_predict and repeat_penalty.", {"temperature": 0}),
]
Format = Annotated[
    str | dict[str, Any] | None, said("The form of the answer: json, or a JSON schema that the answer matches.", "json")
]
Think = Annotated[bool | str | None, said("Whether the model thinks, or how long: low, medium, high or max.", False)]
Stream = Annotated[
    bool | None, said("Whether the answer comes as lines of JSON while it is generated; true by default.")
]
Logprobs = Annotated[bool | None, said("Whether the answer has the log-probability of each token.")]
TopLogprobs = Annotated[int | None, said("Number of likeliest tokens to report at each place; needs logprobs.", 5)]


class OllamaFunction(msgspec.Struct, kw_only=True):
    """The function of a call in the history."""

    name: Annotated[str, said("The name of the function.", "weather")]
    arguments: Annotated[dict[str, Any] | None, said("Its arguments, as an object.", {"city": "Bonn"})] = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call in the history."""

    function: Annotated[OllamaFunction, said("The called function.")]
    id: Annotated[str | None, said("The id of the call; made from its place where it is absent.")] = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, said("The writer: system, user, assistant or tool.", "user")]
    content: Annotated[str | None, said("The text.", "What is 12 + 30?")] = None
    images: Annotated[list[str] | None, said("Images as base64 without a prefix; they come before the text.")] = None
    thinking: Annotated[str | None, said("The thinking of an assistant's message.")] = None
    tool_calls: Annotated[list[OllamaCall] | None, said("The calls of an assistant's message.")] = None
    tool_name: Annotated[str | None, said("In a message of a tool: the name of the function.", "weather")] = None
    tool_call_id: Annotated[
        str | None, said("In a message of a tool: the id of the call; without it, results belong to calls in order.")
    ] = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    model: Name = None
    stream: Stream = None
    format: Format = None
    options: Options = None
    think: Think = None
    logprobs: Logprobs = None
    top_logprobs: TopLogprobs = None
    return_progress: ReturnProgress = None


class OllamaChatBody(OllamaFields, kw_only=True):
    """The body of /api/chat. Without messages it asks for the model to be loaded."""

    messages: Annotated[
        list[OllamaMessage] | None,
        said("The conversation.", [{"role": "user", "content": "What is 12 + 30?"}]),
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, said("The functions that the model may call.")] = None


class OllamaGenerateBody(OllamaFields, kw_only=True):
    """The body of /api/generate. Without a prompt it asks for the model to be loaded."""

    prompt: Annotated[str | None, said("The text to answer.", "What is 12 + 30?")] = None
    system: Annotated[str | None, said("The text of the system message before the prompt.")] = None
    images: Annotated[list[str] | None, said("Images as base64 without a prefix; they come before the prompt.")] = None
    suffix: Annotated[
        str | None, said("The text after the answer; for models with tokens for filling in the middle.")
    ] = None
    raw: Annotated[bool | None, said("Whether the prompt is continued as it is, without the chat template.")] = None
    template: Annotated[Any, said("Refused; the server's own chat template is used.")] = None
    context: Annotated[Any, said("Refused; send the whole conversation to /api/chat.")] = None


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """The body of /api/show."""

    model: Name = None
    name: Annotated[str | None, said("An older name of model.", "qwen3-8b")] = None


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The body of /api/embed."""

    input: Annotated[str | list[str], said("A text or texts.", ["The film was good.", "The film was bad."])]
    model: Name = None
    truncate: Annotated[
        bool | None, said("Whether inputs that are too long are cut at their end, which is the default, or refused.")
    ] = None
    dimensions: Annotated[int | None, said("Length of the vectors, of models that can shorten them.", 256)] = None


class OllamaEmbeddingsBody(msgspec.Struct, kw_only=True):
    """The body of /api/embeddings, the older route."""

    prompt: Annotated[str, said("A text.", "The film was good.")]
    model: Name = None
