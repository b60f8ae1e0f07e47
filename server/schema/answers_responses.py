"""Types of the answers of /v1/responses: objects, items and events (API.md section 11)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from server.schema.answers_common import ABSENT, Answer, Maybe, PromptProgress, TokenLogprob
from server.schema.fields import said

ItemStatus = Annotated[Literal["in_progress", "completed", "incomplete"], said("How far the item is.", "completed")]
ItemId = Annotated[str, said("The id of the item.")]
Number = Annotated[int, said("The number of the event in its stream, from 0.", 0)]
OutputIndex = Annotated[int, said("The number of the item in the output, from 0.", 0)]
ContentIndex = Annotated[int, said("The number of the part in its item; always 0.", 0)]
CallId = Annotated[str, said("The id that the item with the result refers to.")]
Namespace = Annotated[Maybe[str], said("The namespace of the tool, where it has one.")]
Logprobs = Annotated[list[TokenLogprob], said("Log-probabilities, where they are included.")]
Piece = Annotated[str, said("The next piece.")]


class OutputText(Answer, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: Annotated[str, said("The text.", "42")]
    annotations: Annotated[list[dict[str, Any]], said("Always empty.")]
    logprobs: Logprobs


class ReasoningText(Answer, tag_field="type", tag="reasoning_text"):
    """The text of thinking."""

    text: Annotated[str, said("The thinking.")]


class ReasoningItem(Answer, tag_field="type", tag="reasoning"):
    """The model's thinking."""

    id: ItemId
    status: ItemStatus
    summary: Annotated[list[dict[str, Any]], said("Always empty.")]
    content: Annotated[list[ReasoningText], said("The thinking; empty while the item begins.")]
    encrypted_content: Annotated[Maybe[str], said("The thinking in a form to send back, where it is included.")] = (
        ABSENT
    )


class MessageItem(Answer, tag_field="type", tag="message"):
    """A message of the model."""

    id: ItemId
    status: ItemStatus
    role: Annotated[Literal["assistant"], said("The role of the message.")]
    content: Annotated[list[OutputText], said("The text; empty while the item begins.")]


class FunctionCallItem(Answer, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: ItemId
    status: ItemStatus
    call_id: CallId
    name: Annotated[str, said("The name of the function.", "weather")]
    arguments: Annotated[str, said("Its arguments as JSON; empty while the item begins.")]
    namespace: Namespace = ABSENT


class CustomCallItem(Answer, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes free text."""

    id: ItemId
    status: ItemStatus
    call_id: CallId
    name: Annotated[str, said("The name of the tool.")]
    input: Annotated[str, said("The text; empty while the item begins.")]
    namespace: Namespace = ABSENT


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Answer):
    """Parts of the input's tokens."""

    cached_tokens: Annotated[int, said("Tokens that the prefix cache had.", 0)]
    cache_write_tokens: Annotated[int, said("Always 0.")]


class OutputTokensDetails(Answer):
    """Parts of the output's tokens."""

    reasoning_tokens: Annotated[int, said("Tokens of thinking.", 0)]


class ResponseUsage(Answer):
    """Counts of tokens."""

    input_tokens: Annotated[int, said("Tokens of the prompt.", 20)]
    input_tokens_details: Annotated[InputTokensDetails, said("Parts of the input's tokens.")]
    output_tokens: Annotated[int, said("Generated tokens.", 3)]
    output_tokens_details: Annotated[OutputTokensDetails, said("Parts of the output's tokens.")]
    total_tokens: Annotated[int, said("The sum of both.", 23)]


class ResponseFault(Answer):
    """The error of a failed response."""

    code: Annotated[Literal["rate_limit_exceeded", "server_error"], said("The protocol's word for the cause.")]
    message: Annotated[str, said("What went wrong.")]


class IncompleteDetails(Answer):
    """The reason why a response is incomplete."""

    reason: Annotated[Literal["max_output_tokens"], said("What ended it.")]


class EchoedReasoning(Answer):
    """The request's options for thinking."""

    effort: Annotated[str | None, said("The effort that was asked for.")]
    summary: Annotated[str | None, said("The summary that was asked for.")]


class EchoedText(Answer):
    """The request's options for the text."""

    format: Annotated[dict[str, Any], said("The format that was asked for.", {"type": "text"})]
    verbosity: Annotated[Maybe[str], said("The verbosity that was asked for.")] = ABSENT


class Response(Answer):
    """A response, and the fields of its request with their defaults."""

    id: Annotated[str, said("The id of the response.", "resp_5f0c")]
    object: Annotated[Literal["response"], said("The kind of this object.")]
    created_at: Annotated[int, said("When it was begun, in seconds since 1970.", 1790000000)]
    status: Annotated[
        Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
        said("How far the response is.", "completed"),
    ]
    error: Annotated[ResponseFault | None, said("Why it failed.")]
    incomplete_details: Annotated[IncompleteDetails | None, said("Why it is incomplete.")]
    output: Annotated[list[OutputItem], said("What the model made, in its order.")]
    usage: Annotated[ResponseUsage | None, said("Counts of tokens; null before the end.")]
    background: Annotated[bool, said("Whether it is made without a waiting client.")]
    instructions: Annotated[str | None, said("The instructions of the request.")]
    max_output_tokens: Annotated[int | None, said("Most tokens to generate, as asked for.")]
    metadata: Annotated[dict[str, str], said("The caller's texts by name.")]
    model: Annotated[str, said("The served name that was asked for.", "qwen3-8b")]
    parallel_tool_calls: Annotated[bool, said("Whether it may hold several calls.")]
    previous_response_id: Annotated[str | None, said("The response that it continues.")]
    prompt_cache_key: Annotated[str | None, said("The request's key.")]
    reasoning: Annotated[EchoedReasoning, said("Options of thinking.")]
    service_tier: Annotated[None, said("Always null.")]
    store: Annotated[bool, said("Whether it can be read and continued later.")]
    temperature: Annotated[float, said("The temperature that was used.", 0.7)]
    text: Annotated[EchoedText, said("Options of the text.")]
    tool_choice: Annotated[str | dict[str, Any], said("Whether tools are called.", "auto")]
    tools: Annotated[list[dict[str, Any]], said("The tools of the request, without those that are not served.")]
    top_logprobs: Annotated[int, said("Number of likeliest tokens at each place.", 0)]
    top_p: Annotated[float, said("The share that was used.", 1.0)]
    truncation: Annotated[Literal["auto", "disabled"], said("Whether a long input is cut.")]
    user: Annotated[str | None, said("The request's user.")]


class DeletedResponse(Answer):
    """A response that is no longer stored."""

    id: Annotated[str, said("Its id.", "resp_5f0c")]
    object: Annotated[Literal["response"], said("The kind of the object.")]
    deleted: Annotated[bool, said("Always true.")]


class InputTokens(Answer):
    """The size of a response's input."""

    object: Annotated[Literal["response.input_tokens"], said("The kind of this object.")]
    input_tokens: Annotated[int, said("Tokens of the input.", 20)]


class InputItemList(Answer):
    """A page of the input items of a response."""

    object: Annotated[Literal["list"], said("The kind of this object.")]
    data: Annotated[list[dict[str, Any]], said("The items as they were sent, each with an id.")]
    first_id: Annotated[str | None, said("The id of the first item of the page.")]
    last_id: Annotated[str | None, said("The id of the last item of the page.")]
    has_more: Annotated[bool, said("Whether there are items after the page.")]


class ResponseEvent(Answer):
    """Common fields of the events of a whole response."""

    response: Annotated[Response, said("The response as it is now.")]
    sequence_number: Number


class CreatedEvent(ResponseEvent, tag_field="type", tag="response.created"):
    """The first event of a response."""


class InProgressEvent(ResponseEvent, tag_field="type", tag="response.in_progress"):
    """The second event of a response, sent when the model has begun."""


class ResponseProgressEvent(Answer, tag_field="type", tag="response.prompt_progress"):
    """An event before the first item, where return_progress is set."""

    prompt_progress: Annotated[PromptProgress, said("How far the prompt is.")]
    sequence_number: Number


class CompletedEvent(ResponseEvent, tag_field="type", tag="response.completed"):
    """The last event of a completed response."""


class IncompleteEvent(ResponseEvent, tag_field="type", tag="response.incomplete"):
    """The last event of a response that was cut off."""


class FailedEvent(ResponseEvent, tag_field="type", tag="response.failed"):
    """The last event of a failed response."""


class ItemEvent(Answer):
    """Common fields of the events of an item."""

    output_index: OutputIndex
    item: Annotated[OutputItem, said("The item as it is now.")]
    sequence_number: Number


class ItemAddedEvent(ItemEvent, tag_field="type", tag="response.output_item.added"):
    """The event that begins an item."""


class ItemDoneEvent(ItemEvent, tag_field="type", tag="response.output_item.done"):
    """The event that ends an item."""


class WithinItem(Answer):
    """Common fields of the events inside an item."""

    item_id: ItemId
    output_index: OutputIndex
    sequence_number: Number


class PartEvent(WithinItem):
    """Common fields of the events of a part."""

    content_index: ContentIndex
    part: Annotated[OutputText | ReasoningText, said("The part as it is now.")]


class PartAddedEvent(PartEvent, tag_field="type", tag="response.content_part.added"):
    """The event that begins a part of an item."""


class PartDoneEvent(PartEvent, tag_field="type", tag="response.content_part.done"):
    """The event that ends a part of an item."""


class TextDeltaEvent(WithinItem, tag_field="type", tag="response.output_text.delta"):
    """An event with the next piece of a text."""

    content_index: ContentIndex
    delta: Piece
    logprobs: Logprobs


class TextDoneEvent(WithinItem, tag_field="type", tag="response.output_text.done"):
    """The event with a whole text."""

    content_index: ContentIndex
    text: Annotated[str, said("The whole text.")]
    logprobs: Logprobs


class ReasoningDeltaEvent(WithinItem, tag_field="type", tag="response.reasoning_text.delta"):
    """An event with the next piece of reasoning."""

    content_index: ContentIndex
    delta: Piece


class ReasoningDoneEvent(WithinItem, tag_field="type", tag="response.reasoning_text.done"):
    """The event with the whole reasoning."""

    content_index: ContentIndex
    text: Annotated[str, said("The whole thinking.")]


class ArgumentsDeltaEvent(WithinItem, tag_field="type", tag="response.function_call_arguments.delta"):
    """An event with the next piece of a call's arguments."""

    delta: Piece


class ArgumentsDoneEvent(WithinItem, tag_field="type", tag="response.function_call_arguments.done"):
    """The event with the whole arguments of a call."""

    name: Annotated[str, said("The name of the function.")]
    arguments: Annotated[str, said("The whole arguments as JSON.")]


class CustomInputDeltaEvent(WithinItem, tag_field="type", tag="response.custom_tool_call_input.delta"):
    """An event with the next piece of a custom tool's input."""

    delta: Piece


class CustomInputDoneEvent(WithinItem, tag_field="type", tag="response.custom_tool_call_input.done"):
    """The event with the whole input of a custom tool."""

    input: Annotated[str, said("The whole input.")]


ResponseStreamEvent = (
    CreatedEvent | InProgressEvent | CompletedEvent | IncompleteEvent | FailedEvent | ItemAddedEvent | ItemDoneEvent
    | PartAddedEvent | PartDoneEvent | TextDeltaEvent | TextDoneEvent | ReasoningDeltaEvent | ReasoningDoneEvent
    | ResponseProgressEvent | ArgumentsDeltaEvent | ArgumentsDoneEvent | CustomInputDeltaEvent | CustomInputDoneEvent
)  # fmt: skip
