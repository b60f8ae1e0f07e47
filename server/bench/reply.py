"""Reply: one request of a benchmark and its result. EventReader: finds tokens, usage and errors in its events.

Owner: the process that sent the request. Times are seconds of time.perf_counter, which is the same clock in all
processes of a machine. Tokens are counted by the server's `usage`; if the server sends none, events are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_ERROR = 600  # characters of an error's text


@dataclass(slots=True)
class Reply:
    """Result of one request. `number` is the conversation's, below 0 in the warm-up. `first` and `last` are 0 until a
    token comes. `place`: index among the places for concurrent requests. `cut`: the load ended before the request did.

    `last` is the time of the event with the finish reason, or of the last event with tokens if there was none.
    """

    number: int
    turn: int
    due: float = 0.0  # when the schedule sends it
    place: int = 0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between events with tokens
    events: int = 0
    prompt_tokens: int = -1  # -1: unknown
    completion_tokens: int = -1
    cached_tokens: int = 0
    finish: str = ""
    error: str = ""
    cut: bool = False
    text: str = ""  # stored only if a next turn needs it

    @property
    def tokens(self) -> int:
        """Number of generated tokens by the server's count, otherwise the number of events."""
        return self.completion_tokens if self.completion_tokens >= 0 else self.events


class EventReader:
    """Parses one answer's body as its bytes arrive."""

    __slots__ = ("answer", "done", "keeps_text", "pieces", "tail")

    def __init__(self, answer: Reply, keeps_text: bool) -> None:
        self.answer = answer
        self.keeps_text = keeps_text
        self.pieces: list[str] = []
        self.tail = b""
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parse a piece of a stream of server-sent events, read at `now`."""
        lines = (self.tail + data).split(b"\n")
        self.tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self.event(line[5:].strip(), now)

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except ValueError:
            self.answer.error = f"an event is not JSON: {data[:200]!r}"
            return
        try:
            if "error" in event:
                self.answer.error = str(event["error"])[:MAX_ERROR]
            elif "choices" in event:
                self.choices(event, now)
        except (AttributeError, LookupError, TypeError):  # JSON of other types than in the API
            self.answer.error = f"an event is no part of a completion: {data[:200]!r}"

    def choices(self, event: dict[str, Any], now: float) -> None:
        answer = self.answer
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            text = delta.get("content") or choice.get("text") or ""
            if text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
                if answer.events:
                    answer.gaps.append(now - answer.last)
                else:
                    answer.first = now
                answer.last = now
                answer.events += 1
                if self.keeps_text:
                    self.pieces.append(str(text))
            if choice.get("finish_reason"):
                answer.finish = choice["finish_reason"]
                answer.last = now  # tokens after the last text have no event of their own
        if event.get("usage"):
            self.usage(event["usage"])

    def usage(self, usage: dict[str, Any]) -> None:
        answer = self.answer
        answer.prompt_tokens = usage.get("prompt_tokens", -1)
        answer.completion_tokens = usage.get("completion_tokens", -1)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def whole(self, body: bytes) -> None:
        """Parse the body of an answer that was not streamed."""
        try:
            found = orjson.loads(body)
            choice = found["choices"][0]
        except (ValueError, LookupError, TypeError):
            self.answer.error = f"the answer is no completion: {body[:200]!r}"
            return
        self.answer.finish = choice.get("finish_reason") or ""
        if self.keeps_text:
            self.pieces.append((choice.get("message") or choice).get("content") or choice.get("text") or "")
        self.usage(found.get("usage") or {})
        self.done = True

    def close(self, now: float) -> None:
        """End the answer; sets its error if it is incomplete."""
        answer = self.answer
        answer.end = now
        answer.text = "".join(self.pieces)
        if not answer.error and not self.done and not answer.finish:
            answer.error = "the stream ended before the answer did"
        elif not answer.error and not answer.tokens:
            answer.error = "no token came"
