"""Types of the answers of /v1/chat/completions and /v1/completions, whole and streamed (API.md sections 9 and 10)."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import (
    ABSENT,
    Answer,
    ChoiceLogprobs,
    Created,
    FinishReason,
    Id,
    Maybe,
    Measured,
    ModelName,
    Progressing,
    PromptLogprobs,
    PromptRouted,
    PromptTokenIds,
    Routed,
    StopReason,
    TokenIds,
    Usage,
)
from server.schema.fields import said

Index = Annotated[int, said("The number of the choice, from 0.", 0)]
Running = Annotated[Maybe[Usage], said("The counts: of the whole answer in the last chunk, or so far where asked for.")]


class CalledFunction(Answer):
    """The function of a call."""

    name: Annotated[str, said("The name of the function.", "weather")]
    arguments: Annotated[str, said("Its arguments as JSON.", '{"city": "Porto"}')]


class ToolCall(Answer):
    """A call that the model made."""

    id: Annotated[str, said("The id that the message with the result refers to.", "chatcmpl-tool-1")]
    type: Annotated[Literal["function"], said("The kind of the call.")]
    function: Annotated[CalledFunction, said("The function that is called.")]


class AnswerMessage(Answer):
    """The message of a choice."""

    role: Annotated[str, said("The role of the message.", "assistant")]
    content: Annotated[str | None, said("The text; null where the message has calls or thinking alone.", "42")]
    refusal: Annotated[None, said("Always null.")]
    reasoning: Annotated[Maybe[str], said("The model's thinking.")] = ABSENT
    reasoning_content: Annotated[Maybe[str], said("The same text under its older name.")] = ABSENT
    tool_calls: Annotated[Maybe[list[ToolCall]], said("The calls that the model made.")] = ABSENT


class ChatChoice(Answer):
    """One of the answers."""

    index: Index
    message: Annotated[AnswerMessage, said("The answer.")]
    logprobs: Annotated[ChoiceLogprobs | None, said("Log-probabilities, where they were asked for.")]
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIds = ABSENT
    routed_experts: Routed = ABSENT


class ReplacedFrame(Answer):
    """A frame of a film that could not be decoded."""

    frame: Annotated[int, said("The number of the frame.")]
    shown: Annotated[int, said("The number of the frame that took its place.")]


class ReplacedFrames(Answer):
    """Frames of one film."""

    item: Annotated[str | int, said("The place of the film in the request.")]
    frames: Annotated[list[ReplacedFrame], said("The frames that were replaced.")]


class ChatCompletion(Answer):
    """A finished answer to a conversation."""

    id: Id
    object: Annotated[Literal["chat.completion"], said("The kind of this object.")]
    created: Created
    model: ModelName
    choices: Annotated[list[ChatChoice], said("The answers.")]
    usage: Annotated[Usage, said("Counts of tokens.")]
    system_fingerprint: Annotated[None, said("Always null.")]
    service_tier: Annotated[None, said("Always null.")]
    prompt_logprobs: Annotated[
        PromptLogprobs | None,
        said("For each token of the prompt its candidates by token id; null for the first token."),
    ]
    metrics: Measured = ABSENT
    prompt_token_ids: PromptTokenIds = ABSENT
    prompt_text: Annotated[Maybe[str | None], said("The rendered prompt, where return_prompt_text is set.")] = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT
    replaced_frames: Annotated[
        Maybe[list[ReplacedFrames]], said("Frames of films that could not be decoded, with those in their place.")
    ] = ABSENT


class FunctionDelta(Answer):
    """A delta of the function in a call."""

    arguments: Annotated[str, said("The next piece of the arguments; pieces join to the whole JSON.")]
    name: Annotated[Maybe[str], said("The name of the function, in the first piece.")] = ABSENT


class ToolCallDelta(Answer):
    """A delta of a call."""

    index: Annotated[int, said("The number of the call within its message, from 0.", 0)]
    function: Annotated[FunctionDelta, said("What is new of the function.")]
    id: Annotated[Maybe[str], said("The id of the call, in the first piece.")] = ABSENT
    type: Annotated[Maybe[Literal["function"]], said("The kind of the call, in the first piece.")] = ABSENT


class Delta(Answer):
    """A delta of a message; empty in the chunk that ends a choice."""

    role: Annotated[Maybe[str], said("The role of the message, in the first chunk.")] = ABSENT
    content: Annotated[Maybe[str], said("The next piece of the text.")] = ABSENT
    reasoning: Annotated[Maybe[str], said("The next piece of the thinking.")] = ABSENT
    reasoning_content: Annotated[Maybe[str], said("The same piece under its older name.")] = ABSENT
    tool_calls: Annotated[Maybe[list[ToolCallDelta]], said("What is new of calls.")] = ABSENT


class ChunkChoice(Answer):
    """A delta of one choice."""

    index: Index
    delta: Annotated[Delta, said("What is new.")]
    logprobs: Annotated[ChoiceLogprobs | None, said("Log-probabilities of the new tokens, where asked for.")]
    finish_reason: FinishReason
    stop_reason: Annotated[Maybe[int | str | None], said("As in a finished answer, in a choice's last chunk.")] = ABSENT
    prompt_token_ids: PromptTokenIds = ABSENT
    token_ids: TokenIds = ABSENT
    routed_experts: Routed = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT


class ChatCompletionChunk(Answer):
    """An event of a streamed answer to a conversation; the stream ends with the text [DONE]."""

    id: Id
    object: Annotated[Literal["chat.completion.chunk"], said("The kind of this object.")]
    created: Created
    model: ModelName
    choices: Annotated[list[ChunkChoice], said("What is new; empty in the chunk with the counts.")]
    usage: Running = ABSENT
    metrics: Measured = ABSENT
    prompt_progress: Progressing = ABSENT


class CompletionLogprobs(Answer):
    """Log-probabilities of a text: four lists with an entry for each token."""

    tokens: Annotated[list[str], said("The tokens as texts.")]
    token_logprobs: Annotated[
        list[float | None], said("Their log-probabilities; null for the first token of a prompt.")
    ]
    top_logprobs: Annotated[list[dict[str, float] | None], said("The likeliest tokens at each place, by text.")]
    text_offset: Annotated[list[int], said("Where each token begins in the text, in characters.")]


class CompletionChoice(Answer):
    """One of the texts."""

    index: Annotated[int, said("The number of the choice: the prompt's number times n, and the choice's own.", 0)]
    text: Annotated[str, said("The text that continues the prompt.", " there was a king")]
    logprobs: Annotated[CompletionLogprobs | None, said("Log-probabilities, where they were asked for.")]
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_logprobs: Annotated[PromptLogprobs | None, said("Candidates at each place of the prompt, where asked for.")]
    prompt_token_ids: PromptTokenIds = ABSENT
    token_ids: TokenIds = ABSENT
    routed_experts: Routed = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT


class Completion(Answer):
    """Finished continuations of texts."""

    id: Id
    object: Annotated[Literal["text_completion"], said("The kind of this object.")]
    created: Created
    model: ModelName
    choices: Annotated[list[CompletionChoice], said("The texts, prompt by prompt.")]
    usage: Annotated[Usage, said("Counts of tokens.")]
    system_fingerprint: Annotated[None, said("Always null.")]
    metrics: Measured = ABSENT


class CompletionChunkChoice(Answer):
    """A delta of one choice."""

    index: Index
    text: Annotated[str, said("The next piece of the text.")]
    logprobs: Annotated[CompletionLogprobs | None, said("Log-probabilities of the new tokens, where asked for.")]
    finish_reason: FinishReason
    stop_reason: Annotated[Maybe[int | str | None], said("As in a finished answer, in a choice's last chunk.")] = ABSENT
    prompt_token_ids: PromptTokenIds = ABSENT
    token_ids: TokenIds = ABSENT
    routed_experts: Routed = ABSENT
    prompt_routed_experts: PromptRouted = ABSENT


class CompletionChunk(Answer):
    """An event of streamed continuations; the stream ends with the text [DONE]."""

    id: Id
    object: Annotated[Literal["text_completion"], said("The kind of this object.")]
    created: Created
    model: ModelName
    choices: Annotated[list[CompletionChunkChoice], said("What is new; empty in the chunk with the counts.")]
    usage: Running = ABSENT
    metrics: Measured = ABSENT
    prompt_progress: Progressing = ABSENT
