"""The bodies of /v1/messages and /v1/messages/count_tokens (API.md section 12).

Messages, system blocks and tools stay as sent; render/blocks.py reads them. The decoder ignores unknown fields,
including those of betas.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from server.schema import fields
from server.schema.fields import said


class CountBody(msgspec.Struct, kw_only=True):
    """The fields that make the prompt."""

    model: fields.Model = None
    messages: Annotated[
        list[dict[str, Any]],
        said(
            "The conversation: messages with role and content, where content is a text or a list of blocks.",
            [{"role": "user", "content": "Hello"}],
        ),
    ]
    system: Annotated[
        str | list[dict[str, Any]] | None,
        said("Instructions before the conversation: a text, or blocks of text.", "Be brief."),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, said("The tools that the model may use: name, description and input_schema.")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        said("Whether tools are used: an object of type auto, any, tool or none.", {"type": "auto"}),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        said(
            "Whether the model thinks, and for how many tokens: an object of type enabled, disabled or adaptive.",
            {"type": "disabled"},
        ),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, said("The effort of thinking and the format of the answer.", {"effort": "low"})
    ] = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None
    cache_salt: fields.CacheSalt = None


class SampledMessages(CountBody, kw_only=True):
    """The fields of SamplerFields: a msgspec struct has one base."""

    dry_multiplier: fields.DryMultiplier = None
    dry_base: fields.DryBase = None
    dry_allowed_length: fields.DryAllowedLength = None
    dry_penalty_last_n: fields.DryPenaltyLastN = None
    dry_sequence_breakers: fields.DrySequenceBreakers = None
    top_n_sigma: fields.TopNSigma = None
    xtc_probability: fields.XtcProbability = None
    xtc_threshold: fields.XtcThreshold = None


class MessagesBody(SampledMessages, kw_only=True):
    """The fields of the prompt and of the answer."""

    max_tokens: Annotated[int, said("Most tokens to generate.", 256)]
    stop_sequences: Annotated[list[str] | None, said("Texts that end the answer.", ["END"])] = None
    temperature: fields.Temperature = None
    top_p: fields.TopP = None
    top_k: fields.TopK = None
    stream: fields.Stream = None
    metadata: Annotated[dict[str, Any] | None, said("The caller's data; accepted without effect.")] = None
    priority: fields.Priority = None
    thread: Annotated[
        dict[str, Any] | None, said("Refused: this server stores no conversations for this protocol.")
    ] = None
    output_format: Annotated[dict[str, Any] | None, said("The older place of output_config.format.")] = None
    return_routed_experts: fields.NoRoutedExperts = None
    return_progress: fields.ReturnProgress = None
