"""Types of the answers of /v1/messages, whole and streamed (API.md section 12)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from server.schema.answers_common import Answer, MessagesError, PromptProgress
from server.schema.fields import said

MessageStop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
BlockIndex = Annotated[int, said("The number of the block, from 0.", 0)]


class MessageUsage(Answer):
    """Counts of tokens in the Anthropic protocol."""

    input_tokens: Annotated[int, said("Tokens of the prompt that were computed, without those of the cache.", 20)]
    cache_creation_input_tokens: Annotated[int, said("Always 0.")]
    cache_read_input_tokens: Annotated[int, said("Tokens of the prompt that the prefix cache had.", 0)]
    output_tokens: Annotated[int, said("Generated tokens so far.", 3)]


class TextBlock(Answer, tag_field="type", tag="text"):
    """A piece of text."""

    text: Annotated[str, said("The text; empty in the event that opens the block.", "42")]


class ThinkingBlock(Answer, tag_field="type", tag="thinking"):
    """A piece of thinking."""

    thinking: Annotated[str, said("The thinking; empty in the event that opens the block.")]
    signature: Annotated[str, said("A constant that clients send back.")]


class ToolUseBlock(Answer, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: Annotated[str, said("The id that the block with the result refers to.", "toolu_1")]
    name: Annotated[str, said("The name of the tool.", "weather")]
    input: Annotated[dict[str, Any], said("The tool's input; empty in the event that opens the block.")]


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(Answer):
    """An answer in the Anthropic protocol."""

    id: Annotated[str, said("The id of the message.", "msg_5f0c")]
    type: Annotated[Literal["message"], said("The kind of this object.")]
    role: Annotated[Literal["assistant"], said("The role of the message.")]
    model: Annotated[str, said("The served name that was asked for.", "qwen3-8b")]
    content: Annotated[list[MessageBlock], said("The blocks of the answer; empty in the event that begins a stream.")]
    stop_reason: Annotated[MessageStop | None, said("Why the answer ended; null while it goes on.", "end_turn")]
    stop_sequence: Annotated[str | None, said("The text that ended the answer.")]
    usage: Annotated[MessageUsage, said("Counts of tokens.")]


class TokenCount(Answer):
    """The size of a conversation."""

    input_tokens: Annotated[int, said("Tokens of the conversation.", 20)]


class MessageStartEvent(Answer, tag_field="type", tag="message_start"):
    """The first event: the message without content."""

    message: Annotated[Message, said("The message as it begins.")]


class BlockStartEvent(Answer, tag_field="type", tag="content_block_start"):
    """The event that begins a block."""

    index: BlockIndex
    content_block: Annotated[MessageBlock, said("The block as it begins.")]


class TextDelta(Answer, tag_field="type", tag="text_delta"):
    """A delta of a text block."""

    text: Annotated[str, said("The next piece.")]


class ThinkingDelta(Answer, tag_field="type", tag="thinking_delta"):
    """A delta of a thinking block."""

    thinking: Annotated[str, said("The next piece.")]


class SignatureDelta(Answer, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, sent before the block ends."""

    signature: Annotated[str, said("A constant that clients send back.")]


class InputDelta(Answer, tag_field="type", tag="input_json_delta"):
    """A delta of a tool's input."""

    partial_json: Annotated[str, said("The next piece; pieces join to the whole JSON.")]


class BlockDeltaEvent(Answer, tag_field="type", tag="content_block_delta"):
    """An event with a delta of the open block."""

    index: BlockIndex
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, said("What is new.")]


class BlockStopEvent(Answer, tag_field="type", tag="content_block_stop"):
    """The event that ends a block."""

    index: BlockIndex


class MessageEnd(Answer):
    """The reason why a message ended."""

    stop_reason: Annotated[MessageStop, said("Why the answer ended.", "end_turn")]
    stop_sequence: Annotated[str | None, said("The text that ended the answer.")]


class MessageDeltaEvent(Answer, tag_field="type", tag="message_delta"):
    """The event with the end reason, after all content of the message."""

    delta: Annotated[MessageEnd, said("How the message ended.")]
    usage: Annotated[MessageUsage, said("Counts of tokens.")]


class MessageStopEvent(Answer, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class MessageProgressEvent(Answer, tag_field="type", tag="prompt_progress"):
    """An event before the message, where return_progress is set; clients of this protocol skip it."""

    prompt_progress: Annotated[PromptProgress, said("How far the prompt is.")]


MessageEvent = (
    MessageStartEvent
    | BlockStartEvent
    | BlockDeltaEvent
    | BlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
    | MessageProgressEvent
    | MessagesError
)
