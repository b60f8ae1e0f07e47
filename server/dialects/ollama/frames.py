"""Ollama's answers: lines of JSON while an answer grows, or one object.

Owner: loop, one OllamaLines per stream. In: the one Choice of an Answer. Out: frames, or a dict for orjson. A call is
sent when it is complete, because its arguments are an object. The last line has no text, but the reason of the end and
the times. Constant parts are encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson

from engine.base.request import Progress, TokenLogprob
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.http.sse import NDJSON
from server.output.choices import progress_of
from server.output.completed import completed
from server.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, Said
from server.output.logprobs import TokenNames

dumps = orjson.dumps
Shape = Callable[..., dict[str, Any]]  # (text, further fields of the message) -> fields of the answer


def message(content: str = "", **more: Any) -> dict[str, Any]:
    """The shape of /api/chat."""
    return {"message": {"role": "assistant", "content": content, **more}}


def response(content: str = "", **more: Any) -> dict[str, Any]:
    """The shape of /api/generate."""
    return {"response": content, **more}


def moment(seconds: float) -> str:
    """RFC 3339 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def called(name: str, arguments: str) -> dict[str, Any]:
    """A call; of arguments that were cut off, the complete part."""
    return {"function": {"name": name, "arguments": completed(arguments)}}


class OllamaLines:
    """The frames of one answer."""

    form = NDJSON
    done = b""  # the object with `done` is the end of the stream

    def __init__(self, answer: Answer, model: str, shape: Shape, names: TokenNames, top: int) -> None:
        """`top`: number of likeliest tokens at each place."""
        self.answer = answer
        self.shape = shape
        self.names = names
        self.top = top
        self.head = {"model": model, "created_at": moment(answer.created)}
        self.has_logprobs = answer.asked.params.logprobs is not None
        self.call: tuple[str, list[str]] | None = None  # name of the open call, and its arguments so far
        before, after = dumps({**self.head, **shape("\0"), "done": False}).split(dumps("\0"))
        self.parts = before, after + b"\n"  # the bytes around the text of a line

    def chunks(self, choice: Choice) -> bytes:
        ended = choice.finish_reason is not None
        if not ended and not choice.has_text:
            return b""
        choice.started = True
        if not ended and choice.stream.parser is None and not self.has_logprobs:
            return self.parts[0] + dumps(choice.drain_text()) + self.parts[1]
        events, _, entries = choice.drain_events()
        objects = [made for event in events if (made := self.made(event)) is not None]
        if ended:
            objects += [] if self.call is None else [self.close_call()]
            objects.append({**self.shape(), "done": True, **self.ending(choice)})
        if objects and entries and self.has_logprobs:
            objects[0]["logprobs"] = self.logprobs(entries)
        return b"".join(dumps({**self.head, "done": False, **made}) + b"\n" for made in objects)

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        return self.parts if choice.started and not self.has_logprobs else None

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        return dumps({**self.head, **self.shape(), "done": False, **progress_of(progress)}) + b"\n"

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return error.text_body() + b"\n"

    def made(self, event: Event) -> dict[str, Any] | None:
        """The fields that an event adds to a line; None if it adds no line."""
        match event:
            case Content(text):
                return self.shape(text)
            case Reasoning(text):
                return self.shape(thinking=text)
            case CallStart(_, _, name):
                self.call = name, []
            case CallArguments(_, text) if self.call is not None:
                self.call[1].append(text)
            case CallEnd() if self.call is not None:
                return self.close_call()
        return None

    def close_call(self) -> dict[str, Any]:
        assert self.call is not None
        (name, parts), self.call = self.call, None
        return self.shape(tool_calls=[called(name, "".join(parts))])

    def logprobs(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        return self.names.chat(entries, self.top)["content"]

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choice = self.answer.choices[0]
        events, _, entries = choice.drain_events()
        found = Said(events)
        more: dict[str, Any] = {"thinking": found.reasoning} if found.reasoning else {}
        if found.calls:
            more["tool_calls"] = [called(call.name, call.arguments) for call in found.calls]
        made = {**self.head, **self.shape(found.content, **more), "done": True, **self.ending(choice)}
        if self.has_logprobs:
            made["logprobs"] = self.logprobs(entries)
        return made

    def ending(self, choice: Choice) -> dict[str, Any]:
        """The reason of the end, counts of tokens, and times in ns: of the wait, of the prompt, of the answer."""
        exchange, now = self.answer.exchange, time.monotonic()
        waited = exchange.arrival + exchange.queued_s if exchange.queued_s >= 0 else now
        first = choice.first_at or now
        return {
            "done_reason": choice.finish_reason,
            "total_duration": nanoseconds(now - exchange.arrival),
            "load_duration": nanoseconds(waited - exchange.arrival),
            "prompt_eval_count": choice.job.num_tokens,
            "prompt_eval_duration": nanoseconds(first - waited),
            "eval_count": choice.num_tokens,
            "eval_duration": nanoseconds((choice.last_at or now) - first),
        }


def nanoseconds(seconds: float) -> int:
    """At least 1, since clients divide by it."""
    return max(1, int(seconds * 1e9))
