"""Anthropic answers: the body of a finished message, and the events of a streamed one.

Owner: loop, one MessageEvents per stream. In: the one Choice of an Answer. Out: a dict for orjson, or frames. Order:
message_start, then per block content_block_start, deltas, content_block_stop, then message_delta and message_stop. A
message has at least one block, if need be an empty text. Constant parts are encoded once.
"""

from __future__ import annotations

from typing import Any

import orjson

from server.answer import Answer
from server.choice import Choice
from server.errors import ApiError

dumps = orjson.dumps

BLOCK_START = (
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
)
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
DELTA_END = b"}}\n\n"
BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def stop_of(choice: Choice) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence); what was cut for whatever reason is max_tokens."""
    if choice.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


def usage_of(answer: Answer, output_tokens: int) -> dict[str, int]:
    """`input_tokens` are those that were computed; what the prefix cache gave is counted apart."""
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
    text, _, _ = choice.drain()
    stop_reason, stop_sequence = stop_of(choice)
    return {
        **message_head(name, model),
        "content": [{"type": "text", "text": text}],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage_of(answer, choice.num_tokens),
    }


class MessageEvents:
    """Frames of one streamed message."""

    done = b""  # message_stop says it all

    def __init__(self, answer: Answer, name: str, model: str) -> None:
        self.answer = answer
        self.name = name
        self.model = model
        self.in_block = False

    def chunks(self, choice: Choice) -> bytes:
        text, _, _ = choice.drain()
        if self.in_block and choice.finish_reason is None:  # nearly every step
            return DELTA + dumps(text) + DELTA_END if text else b""
        frames = b"" if choice.started else self.start(choice)
        if not self.in_block and (text or choice.finish_reason is not None):
            self.in_block = True
            frames += BLOCK_START
        if text:
            frames += DELTA + dumps(text) + DELTA_END
        if choice.finish_reason is not None:
            frames += BLOCK_STOP + self.stop(choice) + MESSAGE_STOP
        return frames

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return (DELTA, DELTA_END) if self.in_block else None

    def start(self, choice: Choice) -> bytes:
        choice.started = True
        message = {
            **message_head(self.name, self.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self.answer, 1),  # the first token is on its way
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

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.messages_body(self.answer.exchange.request_id) + b"\n\n"
