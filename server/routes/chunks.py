"""Chunks of chat and completion streams: the exact bytes between `data: ` and the empty line.

Owner: loop, one object per stream. Constant parts of a stream are encoded when it begins; per token, only the text goes
through orjson. Order per choice: role chunk (chat), content, exactly one chunk with finish_reason; then once the usage
chunk and [DONE] (API.md 3.5, 9, 10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from engine.base.request import Progress, TokenLogprob
from server.answers import routed
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.http.sse import DONE, SSE
from server.output.choices import echo_text, progress_of, reasoning_names, usage
from server.output.events import CallArguments, CallStart, Content, Event, Reasoning
from server.output.logprobs import CompletionLogprobs, TokenNames, joined

dumps = orjson.dumps


class Chunks:
    """The common base of chat and completion chunks."""

    kind = ""
    form = SSE
    done = DONE
    before: list[bytes]  # per choice, the bytes before the JSON string of its text
    after: bytes  # the bytes after the text, if no other field has changed

    def __init__(self, answer: Answer, response_id: str, model: str, return_token_ids: bool) -> None:
        self.answer = answer
        self.return_token_ids = return_token_ids
        head = {"id": response_id, "object": self.kind, "created": int(answer.created), "model": model}
        self.head = b"data: " + dumps(head)[:-1] + b',"choices":['
        self.continuous = answer.asked.continuous_usage
        self.is_plain = not self.continuous and not return_token_ids and answer.asked.params.logprobs is None

    def close(self, choice: Choice) -> bytes:
        """The end of a chunk, with the running usage if requested."""
        if not self.continuous:
            return b"}]}\n\n"
        job = choice.job
        at = choice.index // self.answer.asked.n
        running = usage(
            job.num_tokens,
            choice.num_tokens,
            cached_tokens=self.answer.cached_tokens[at],
            multimodal_tokens={str(kind): count for kind, count in job.media_tokens.items()},
            reasoning_tokens=choice.reasoning_tokens,
        )
        return b'}],"usage":' + dumps(running) + b"}\n\n"

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return (self.before[choice.index], self.after) if self.is_plain and choice.started else None

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        """A chunk whose choice has no text."""
        return self.before[choice.index] + b'""' + self.after[:-3] + b"," + dumps(progress_of(progress))[1:] + b"\n\n"

    def usage(self) -> bytes:
        if not self.answer.asked.include_usage:
            return b""
        return self.head + b"]," + dumps({"usage": self.answer.usage(), **self.answer.reported()})[1:] + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def routed(self, choice: Choice) -> bytes:
        """The fields of routed experts: at the end of a choice those of its tokens, for the first choice also of the
        prompt.
        """
        if choice.routed_experts is None or choice.finish_reason is None:
            return b""
        fields = routed.of_both(choice, self.answer.asked.n)
        return b"," + dumps(fields)[1:-1]

    def ids(self, token_ids: list[int]) -> bytes:
        return b',"token_ids":' + dumps(token_ids) if self.return_token_ids else b""


def ending(choice: Choice, named: bool = False) -> bytes:
    if choice.finish_reason is None:
        return b',"finish_reason":null'
    return b',"finish_reason":' + dumps(chat_finish(choice, named)) + b',"stop_reason":' + dumps(choice.stop_reason)


def chat_finish(choice: Choice, named: bool) -> str | None:
    """finish_reason; "tool_calls" for a choice that ended by itself and has calls, whose results the client must send.

    `named`: the client named the tool, so it expects the call.
    """
    waits = choice.num_calls and choice.finish_reason == "stop" and not named
    return "tool_calls" if waits else choice.finish_reason


def delta_of(event: Event, fields: tuple[str, ...]) -> bytes:
    """The `delta` object of one event; b"" for an event that chat does not send. `fields`: names of reasoning."""
    match event:
        case Content(text):
            return b'{"content":' + dumps(text) + b"}"
        case Reasoning(text):
            return dumps(dict.fromkeys(fields, text))
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":' % index + dumps(text) + b"}}]}"
        case CallStart(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return dumps({"tool_calls": [call]})
    return b""


@dataclass(frozen=True, slots=True)
class ChatExtras:
    """Options of a chat stream in addition to its text."""

    names: TokenNames
    top: int  # likeliest tokens per log-probability entry; -1: all
    role: str = "assistant"
    echo: str = ""  # the last message, sent again before the answer
    reasoning_field: str = "both"
    named: bool = False  # the client named the tool that is called


class ChatChunks(Chunks):
    """`chat.completion.chunk`."""

    kind = "chat.completion.chunk"

    def __init__(
        self, answer: Answer, response_id: str, model: str, return_token_ids: bool, options: ChatExtras
    ) -> None:
        super().__init__(answer, response_id, model, return_token_ids)
        self.options = options
        self.fields = reasoning_names(options.reasoning_field)
        self.role = b',"delta":{"role":' + dumps(options.role) + b',"content":""},"logprobs":null,"finish_reason":null'
        indices = range(len(answer.choices))
        self.before = [self.head + b'{"index":%d,"delta":{"content":' % at for at in indices]
        self.after = b'},"logprobs":null,"finish_reason":null' + b"}]}\n\n"

    def chunks(self, choice: Choice) -> bytes:
        opening = b"" if choice.started else self.opening(choice)
        if choice.stream.parser is not None:
            return opening + self.parsed(choice)
        if choice.finish_reason is None:
            if not choice.has_text:
                return opening
            if self.is_plain:
                return opening + self.before[choice.index] + dumps(choice.drain_text()) + self.after
        text, token_ids, logprobs = choice.drain()
        begin = self.before[choice.index] + dumps(text) if text else self.head + b'{"index":%d,"delta":{' % choice.index
        body = (
            begin
            + b'},"logprobs":'
            + self.logprobs(logprobs)
            + ending(choice)
            + self.ids(token_ids)
            + self.routed(choice)
        )
        return opening + body + self.close(choice)

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        return (b"" if choice.started else self.opening(choice)) + super().progress(choice, progress)

    def parsed(self, choice: Choice) -> bytes:
        """A chunk per event. The first chunk has the fields of the tokens; the end has its own chunk."""
        if choice.finish_reason is None and not choice.has_text:
            return b""
        events, token_ids, logprobs = choice.drain_events()
        deltas = [delta for event in events if (delta := delta_of(event, self.fields))]
        ends = choice.finish_reason is not None
        frames: list[bytes] = []
        for delta in [*deltas, b"{}"] if ends else deltas:
            last = ends and len(frames) == len(deltas)
            begin = self.head + b'{"index":%d,"delta":' % choice.index + delta + b',"logprobs":'
            end = ending(choice, self.options.named) + self.routed(choice) if last else b',"finish_reason":null'
            frames.append(begin + self.logprobs(logprobs) + end + self.ids(token_ids) + self.close(choice))
            token_ids, logprobs = [], []
        return b"".join(frames)

    def opening(self, choice: Choice) -> bytes:
        """The role chunk, and the echo."""
        choice.started = True
        prompt = b""
        if self.return_token_ids:
            prompt = b',"prompt_token_ids":' + dumps(choice.job.request.prompt_token_ids.tolist())
        role = self.head + b'{"index":%d' % choice.index + self.role + prompt + self.close(choice)
        if not self.options.echo:
            return role
        said = self.before[choice.index] + dumps(self.options.echo) + b'},"logprobs":null,"finish_reason":null'
        return role + said + self.close(choice)

    def logprobs(self, entries: list[TokenLogprob]) -> bytes:
        if self.answer.asked.params.logprobs is None or not entries:
            return b"null"
        return dumps(self.options.names.chat(entries, self.options.top))


class CompletionChunks(Chunks):
    """`text_completion`, streamed."""

    kind = "text_completion"

    def __init__(
        self,
        answer: Answer,
        response_id: str,
        model: str,
        return_token_ids: bool,
        makers: list[CompletionLogprobs],
        echo: bool,
    ) -> None:
        super().__init__(answer, response_id, model, return_token_ids)
        self.makers = makers  # one per choice; empty without logprobs
        self.echo = echo
        indices = range(len(answer.choices))
        self.before = [self.head + b'{"index":%d,"text":' % at for at in indices]
        self.after = b',"logprobs":null,"finish_reason":null' + b"}]}\n\n"

    def chunks(self, choice: Choice) -> bytes:
        """A choice's new chunk. Tokens without text have one too, if they are the first or chunks have more fields than
        text.
        """
        first = not choice.started
        waits = not choice.num_held or (self.is_plain and not first)
        if choice.finish_reason is None and not choice.has_text and waits:
            return b""
        choice.started = True
        if self.is_plain and choice.finish_reason is None and not first:
            return self.before[choice.index] + dumps(choice.drain_text()) + self.after
        text, token_ids, entries = choice.drain()
        options = echo_text(self.answer.state.tokenizer, choice.job.prompt) + text if first and self.echo else text
        prompt = b""
        if first and self.return_token_ids:
            prompt = b',"prompt_token_ids":' + dumps(choice.job.request.prompt_token_ids.tolist())
        body = self.before[choice.index] + dumps(options) + b',"logprobs":' + self.logprobs(choice, entries, first)
        return body + ending(choice) + prompt + self.ids(token_ids) + self.routed(choice) + self.close(choice)

    def logprobs(self, choice: Choice, entries: list[TokenLogprob], first: bool) -> bytes:
        if not self.makers:
            return b"null"
        maker = self.makers[choice.index]
        prompt = self.answer.prompt_logprobs[choice.index // self.answer.asked.n]
        found: dict[str, Any] | None = None
        if first and self.echo and prompt is not None:
            found = maker.add_prompt(choice.job.request.prompt_token_ids.tolist(), prompt)
        generated = maker.add(entries)
        return dumps(joined(found, generated) if found else generated)
