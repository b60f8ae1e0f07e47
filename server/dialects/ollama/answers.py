"""Types of Ollama's answers: documentation that tests enforce, as server/schema/answers_common.py describes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from server.schema.answers_common import ABSENT, Answer, Maybe, Progressing, TokenLogprob
from server.schema.fields import said

At = Annotated[str, said("When the answer was begun, in the form of RFC 3339.", "2026-09-21T12:00:00Z")]
ModelName = Annotated[str, said("The name that was asked for, or the first served name.", "qwen3-8b")]
Done = Annotated[bool, said("Whether this is the last object of the answer.", True)]
DoneReason = Annotated[
    Maybe[str], said("Why the answer ended: stop, length, abort, repetition; load where nothing was asked.", "stop")
]
Nanoseconds = Annotated[Maybe[int], said("A duration in nanoseconds, in the last object.", 1000000)]
Count = Annotated[Maybe[int], said("A number of tokens, in the last object.", 20)]


class OllamaCalled(Answer):
    """The function of a call."""

    name: Annotated[str, said("The name of the function.", "weather")]
    arguments: Annotated[dict[str, Any], said("Its arguments.", {"city": "Bonn"})]


class OllamaToolCall(Answer):
    """A call by the model."""

    function: Annotated[OllamaCalled, said("The called function.")]


class OllamaAnswered(Answer):
    """A message of the model, or a part of it."""

    role: Annotated[Literal["assistant"], said("Always assistant.")]
    content: Annotated[str, said("The text.", "42")]
    thinking: Annotated[Maybe[str], said("The model's thinking.")] = ABSENT
    tool_calls: Annotated[Maybe[list[OllamaToolCall]], said("The calls of functions.")] = ABSENT


class OllamaEnding(Answer):
    """The fields that both answers share."""

    model: ModelName
    created_at: At
    done: Done
    done_reason: DoneReason = ABSENT
    prompt_progress: Progressing = ABSENT
    logprobs: Annotated[Maybe[list[TokenLogprob]], said("An entry for each token, where logprobs is set.")] = ABSENT
    total_duration: Nanoseconds = ABSENT
    load_duration: Nanoseconds = ABSENT
    prompt_eval_count: Count = ABSENT
    prompt_eval_duration: Nanoseconds = ABSENT
    eval_count: Count = ABSENT
    eval_duration: Nanoseconds = ABSENT


class OllamaChat(OllamaEnding, kw_only=True):
    """The answer of /api/chat, or one line of its stream."""

    message: Annotated[OllamaAnswered, said("The message, or its newest part.")]


class OllamaGenerated(OllamaEnding, kw_only=True):
    """The answer of /api/generate, or one line of its stream."""

    response: Annotated[str, said("The text, or its newest part.", "42")]
    thinking: Annotated[Maybe[str], said("The model's thinking.")] = ABSENT


class OllamaEmbedded(Answer):
    """The answer of /api/embed."""

    model: ModelName
    embeddings: Annotated[list[list[float]], said("A vector of length 1 for each input.")]
    total_duration: Annotated[int, said("The time of the request in nanoseconds.", 1000000)]
    load_duration: Annotated[int, said("Always 0: the model is loaded.", 0)]
    prompt_eval_count: Annotated[int, said("Tokens of all inputs.", 8)]


class OllamaEmbedding(Answer):
    """The answer of /api/embeddings."""

    embedding: Annotated[list[float], said("The vector of the text, with length 1.")]


class OllamaDetails(Answer):
    """Facts about the checkpoint."""

    parent_model: Annotated[str, said("Always empty.")]
    format: Annotated[Literal["safetensors", "gguf"], said("The format of the weights' files.", "safetensors")]
    family: Annotated[str, said("The model_type of the checkpoint.", "qwen3")]
    families: Annotated[list[str], said("The same in a list.", ["qwen3"])]
    parameter_size: Annotated[str, said("The number of parameters; empty with random weights.", "8.2B")]
    quantization_level: Annotated[str, said("The form of the weights.", "BF16")]


class OllamaModel(Answer):
    """A served name."""

    name: Annotated[str, said("The served name.", "qwen3-8b")]
    model: Annotated[str, said("The served name.", "qwen3-8b")]
    modified_at: Annotated[str, said("When the newest file of weights was written.", "2026-09-21T12:00:00Z")]
    size: Annotated[int, said("Bytes of the weights' files.", 16381470720)]
    digest: Annotated[str, said("A digest of the names and sizes of the files, 64 hexadecimal digits.")]
    details: Annotated[OllamaDetails, said("Facts about the checkpoint.")]


class OllamaModels(Answer):
    """The answer of /api/tags."""

    models: Annotated[list[OllamaModel], said("An entry for each served name.")]


class OllamaRunning(OllamaModel, kw_only=True):
    """A served name, which is always loaded."""

    expires_at: Annotated[str, said("A date that does not come: the model stays loaded.", "9999-12-31T23:59:59Z")]
    size_vram: Annotated[int, said("Bytes of the weights on an accelerator; 0 on a CPU.", 16381470720)]
    context_length: Annotated[int, said("Tokens of prompt and answer.", 8192)]


class OllamaRunningModels(Answer):
    """The answer of /api/ps."""

    models: Annotated[list[OllamaRunning], said("An entry for each served name.")]


class OllamaShown(Answer):
    """The answer of /api/show."""

    details: Annotated[OllamaDetails, said("Facts about the checkpoint.")]
    template: Annotated[str, said("The chat template, in Jinja; empty if the model has none.")]
    parameters: Annotated[str, said("The default sampling options, one per line.", "temperature 0.7")]
    model_info: Annotated[
        dict[str, str | int], said("Numbers of the model, by the names of GGUF.", {"general.architecture": "qwen3"})
    ]
    capabilities: Annotated[
        list[str],
        said("Abilities: completion, tools, vision, audio, insert, thinking, embedding.", ["completion"]),
    ]
    modified_at: Annotated[str, said("When the newest file of weights was written.", "2026-09-21T12:00:00Z")]
    license: Annotated[str, said("The text of the checkpoint's LICENSE file; empty if there is none.")]


class OllamaVersion(Answer):
    """The answer of /api/version."""

    version: Annotated[str, said("The version of Ollama whose protocol is spoken.", "0.40.4")]
