"""Types of answers about the server itself: models, version, load, and facts for the chat page."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from server.schema.answers_common import Answer
from server.schema.fields import said

ServedName = Annotated[str, said("The served name.", "qwen3-8b")]
CreatedAt = Annotated[int, said("When the server started, in seconds since 1970.", 1790000000)]
Allowed = Annotated[bool, said("A field of OpenAI's older API; it says nothing about this server.")]


class ModelPermission(Answer):
    """A field of OpenAI's older API."""

    id: Annotated[str, said("The id of the permission.")]
    object: Annotated[Literal["model_permission"], said("The kind of this object.")]
    created: CreatedAt
    allow_create_engine: Allowed
    allow_sampling: Allowed
    allow_logprobs: Allowed
    allow_search_indices: Allowed
    allow_view: Allowed
    allow_fine_tuning: Allowed
    organization: Annotated[str, said("Always *.")]
    group: Annotated[None, said("Always null.")]
    is_blocking: Allowed


class Model(Answer):
    """A name of the served model, for OpenAI's and Anthropic's clients at once."""

    id: ServedName
    object: Annotated[Literal["model"], said("The kind of this object.")]
    created: CreatedAt
    owned_by: Annotated[str, said("Always omniloop.")]
    root: Annotated[str, said("The first served name.", "qwen3-8b")]
    parent: Annotated[str | None, said("The name that this one is an adapter of.")]
    max_model_len: Annotated[int, said("The context length in tokens.", 8192)]
    permission: Annotated[list[ModelPermission], said("A field of OpenAI's older API.")]
    type: Annotated[Literal["model"], said("The kind of this object, for Anthropic's clients.")]
    display_name: ServedName
    created_at: Annotated[str, said("When the server started, in the form of RFC 3339.", "2026-09-21T12:00:00Z")]


class ModelList(Answer):
    """The names of the served model."""

    object: Annotated[Literal["list"], said("The kind of this object.")]
    data: Annotated[list[Model], said("An entry for each name.")]
    has_more: Annotated[bool, said("Always false.")]
    first_id: Annotated[str, said("The first name.")]
    last_id: Annotated[str, said("The last name.")]


class ModelInfo(Answer):
    """Facts about the first name under the keys of SGLang's router."""

    model_path: Annotated[str, said("The served name; no path of the machine.", "qwen3-8b")]
    served_model_name: ServedName
    is_generation: Annotated[bool, said("Whether the model generates text.")]
    context_length: Annotated[int, said("The context length in tokens.", 8192)]
    tokenizer_path: Annotated[str, said("The served name; no path of the machine.", "qwen3-8b")]
    architectures: Annotated[list[str], said("The classes of the checkpoint.", ["Qwen3ForCausalLM"])]
    weight_version: Annotated[str, said("The version of the weights.", "default")]
    preferred_sampling_params: Annotated[
        dict[str, Any] | None, said("Sampling defaults of the model and the operator, where there are any.")
    ]
    has_image_understanding: Annotated[bool, said("Whether the model takes pictures.")]
    has_audio_understanding: Annotated[bool, said("Whether the model takes sound.")]


class Version(Answer):
    """The version of the server."""

    version: Annotated[str, said("The version.", "0.1.0")]


class Load(Answer):
    """The load of the server."""

    server_load: Annotated[int, said("Choices that are prepared, wait or run.", 0)]


class Root(Answer):
    """The answer of / if the chat page is switched off."""

    name: Annotated[Literal["omniloop"], said("The name of the program.")]
    version: Annotated[str, said("The version.", "0.1.0")]
    models: Annotated[list[str], said("The served names.")]


class About(Answer):
    """Facts about the model for the chat page."""

    version: Annotated[str, said("The version.", "0.1.0")]
    models: Annotated[list[str], said("The served names.")]
    family: Annotated[str, said("The family of the model.", "Qwen3")]
    embedded: Annotated[bool, said("Whether the model is the one that comes with the server.")]
    task: Annotated[Literal["chat", "completion", "transcription", "pooling"], said("What the page asks for.")]
    modalities: Annotated[list[str], said("Kinds of input that the model takes.", ["text", "image"])]
    max_model_len: Annotated[int, said("The context length in tokens.", 8192)]
    max_request_bytes: Annotated[int, said("Most bytes of a request's body.", 67108864)]
    max_logprobs: Annotated[int, said("Most likeliest tokens that are reported; -1 means all.", 20)]
    structured_outputs: Annotated[bool, said("Whether answers can be held to a schema.")]
    tool_calls: Annotated[bool, said("Whether the model can call tools.")]
    fill_in_the_middle: Annotated[
        bool, said("Whether the tokenizer has tokens for filling the gap between prompt and suffix.")
    ]
    thinking_switch: Annotated[bool, said("Whether thinking can be switched off.")]
    defaults: Annotated[dict[str, Any], said("Sampling defaults of the model.", {"temperature": 0.7})]
    page: Annotated[str, said("The digest of the page's files.")]
