"""The body of /v1/chat/completions (API.md section 4); messages and tools stay as sent, render/ reads them."""

from __future__ import annotations

from typing import Annotated, Any

from server.schema import fields
from server.schema.common import SamplingFields
from server.schema.fields import said


class ChatBody(SamplingFields, kw_only=True):
    """Fields of chat that completions do not have."""

    messages: Annotated[
        list[dict[str, Any]],
        said(
            "The conversation: messages with role and content, where content is a text or a list of parts.",
            [{"role": "user", "content": "What is 12 + 30?"}],
        ),
    ]
    max_completion_tokens: Annotated[int | None, said("Most tokens to generate; comes before max_tokens.", 64)] = None
    logprobs: Annotated[bool | None, said("Whether the answer has the log-probability of each token.")] = None
    top_logprobs: Annotated[
        int | None, said("Number of likeliest tokens to report at each place; needs logprobs.", 5)
    ] = None
    modalities: Annotated[list[str] | None, said("Kinds of the answer; text is the only one.", ["text"])] = None
    functions: Annotated[list[dict[str, Any]] | None, said("Refused; tools replaced it.")] = None
    function_call: Annotated[str | dict[str, Any] | None, said("Refused; tool_choice replaced it.")] = None
    tools: Annotated[list[dict[str, Any]] | None, said("The functions that the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        said("Whether tools are called: auto, none, required, or an object that names a function.", "auto"),
    ] = None
    parallel_tool_calls: fields.ParallelToolCalls = None
    reasoning_effort: Annotated[
        str | None, said("How long the model thinks: none, minimal, low, medium, high, xhigh or max.", "low")
    ] = None
    thinking_token_budget: Annotated[int | None, said("Most tokens of thinking; -1 means no limit.", 256)] = None
    include_reasoning: Annotated[bool | None, said("Whether the answer has the model's thinking.")] = None
    chat_template_kwargs: fields.ChatTemplateKwargs = None
    chat_template: fields.ChatTemplate = None
    add_generation_prompt: Annotated[bool | None, said("Whether the prompt ends with the beginning of an answer.")] = (
        None
    )
    continue_final_message: Annotated[bool | None, said("Whether the answer continues the last message.")] = None
    echo: Annotated[
        bool | None, said("Whether the answer begins with the last message, if both have the same role.")
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None, said("Documents for the chat template, each with title and text.")
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, said("Options of the media processor; needs --trust-request-mm-kwargs.")
    ] = None
    media_io_kwargs: Annotated[
        dict[str, Any] | None, said("Options of reading media, by modality; needs --trust-request-mm-kwargs.")
    ] = None
    return_prompt_text: Annotated[bool | None, said("Whether the answer has the rendered prompt.")] = None
