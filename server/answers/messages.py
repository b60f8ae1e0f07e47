"""Anthropic answers: the body of a finished message, and the events of a streamed one.

Owner: loop, one MessageEvents per stream. In: the one Choice of an Answer. Out: a dict for orjson, or frames. Order:
message_start, then per block content_block_start, deltas, content_block_stop, then message_delta and message_stop.
Reasoning, text and calls are blocks, one open at a time; a message has at least one block, which may be an empty text.
Constant parts are encoded once.
"""

from __future__ import annotations

from typing import Any

import orjson

from engine.base.request import Progress
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.http.sse import SSE
from server.output.choices import progress_of
from server.output.completed import completed
from server.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, merged

dumps = orjson.dumps

SIGNATURE = "b21uaWxvb3A="  # signature of thinking blocks: clients send it back, and the server ignores it
# event -> (the block's first body, type of its deltas, key of their text); a call makes its own first body
BLOCKS: dict[type[Event], tuple[dict[str, Any], bytes, bytes]] = {
    Content: ({"type": "text", "text": ""}, b"text_delta", b"text"),
    Reasoning: ({"type": "thinking", "thinking": "", "signature": ""}, b"thinking_delta", b"thinking"),
    CallStart: ({}, b"input_json_delta", b"partial_json"),
}
DELTA_END = b"}}\n\n"
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def stop_of(choice: Choice) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence). An answer that did not stop by itself has stop_reason max_tokens."""
    if choice.finish_reason != "stop":
        return "max_tokens", None
    if choice.num_calls:
        return "tool_use", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def usage_of(answer: Answer, output_tokens: int) -> dict[str, int]:
    """Token counts; `input_tokens` excludes tokens from the prefix cache, which have their own count."""
    prompt = answer.jobs[0].num_tokens
    cached = max(0, min(answer.cached_tokens[0], prompt - 1))
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def message_head(name: str, model: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def whole_message(answer: Answer, name: str, model: str) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = answer.choices[0]
    events, _, _ = choice.drain_events()
    stop_reason, stop_sequence = stop_of(choice)
    return {
        **message_head(name, model),
        "content": blocks_of(events),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage_of(answer, choice.num_tokens),
    }


def blocks_of(events: list[Event]) -> list[dict[str, Any]]:
    """The content of a message, in the order of the model's output; for a truncated call, the complete part of
    its input.
    """
    blocks: list[dict[str, Any]] = []
    for event in merged(events):
        match event:
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Reasoning(text):
                blocks.append({"type": "thinking", "thinking": text, "signature": SIGNATURE})
            case CallStart(_, call_id, name):
                blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                blocks[-1]["input"] = completed(text)
    return blocks or [{"type": "text", "text": ""}]


class MessageEvents:
    """Frames of one streamed message."""

    form = SSE
    done = b""  # message_stop is the end of the stream

    def __init__(self, answer: Answer, name: str, model: str) -> None:
        self.answer = answer
        self.name = name
        self.model = model
        self.num_blocks = 0  # blocks begun so far
        self.kind: type[Event] | None = None  # kind of the open block
        self.delta = b""  # the frame of a delta before the JSON string of its text

    def chunks(self, choice: Choice) -> bytes:
        events, _, _ = choice.drain_events()
        frames = [] if choice.started else [self.start(choice)]
        frames += [self.frame(event) for event in events]
        if choice.finish_reason is not None:
            if not self.num_blocks:
                frames.append(self.open(Content("")))
            frames += [self.close(), self.stop(choice), MESSAGE_STOP]
        return b"".join(frames)

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return (self.delta, DELTA_END) if self.kind is Content else None

    def frame(self, event: Event) -> bytes:
        """The frames of one event: a delta, and the start of its block if the block is not open."""
        if isinstance(event, CallStart):
            return self.close() + self.open(event)
        if isinstance(event, CallEnd):
            return self.close()
        frames = b""
        if type(event) is not self.kind and not isinstance(event, CallArguments):
            frames = self.close() + self.open(event)
        return frames + self.delta + dumps(event.text) + DELTA_END

    def open(self, event: Event) -> bytes:
        block, kind, key = BLOCKS[type(event)]
        if isinstance(event, CallStart):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
        at, self.kind = self.num_blocks, type(event)
        self.num_blocks += 1
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"' % at
        self.delta = head + kind + b'","' + key + b'":'
        start = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":' % at
        return start + dumps(block) + b"}\n\n"

    def close(self) -> bytes:
        """The end of the open block, if there is one; a thinking block gets its signature."""
        kind, self.kind, at = self.kind, None, self.num_blocks - 1
        if kind is None:
            return b""
        stop = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % at
        if kind is not Reasoning:
            return stop
        event = {
            "type": "content_block_delta",
            "index": at,
            "delta": {"type": "signature_delta", "signature": SIGNATURE},
        }
        return b"event: content_block_delta\ndata: " + dumps(event) + b"\n\n" + stop

    def start(self, choice: Choice) -> bytes:
        choice.started = True
        message = {
            **message_head(self.name, self.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self.answer, 1),  # the first token has been generated
        }
        return b"event: message_start\ndata: " + dumps({"type": "message_start", "message": message}) + b"\n\n"

    def stop(self, choice: Choice) -> bytes:
        stop_reason, stop_sequence = stop_of(choice)
        event = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": usage_of(self.answer, choice.num_tokens),
        }
        return b"event: message_delta\ndata: " + dumps(event) + b"\n\n"

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        """An event of its own type, which clients of this protocol skip."""
        event = {"type": "prompt_progress", **progress_of(progress)}
        return b"event: prompt_progress\ndata: " + dumps(event) + b"\n\n"

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.messages_body(self.answer.exchange.request_id) + b"\n\n"
