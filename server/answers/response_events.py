"""Events of a streamed response, in the exact order of API.md section 11, numbered from 0.

Owner: loop, one per stream. In: the one Choice of an Answer as it grows. Out: frames. The texts are stored until the
end, because every `.done` repeats them. `on_end` gets the last event before its frame is sent, so a client that has
read this event finds the response in the store.

    created, in_progress | item added, part added | delta ... | text done, part done, item done | ... | completed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.base.request import Progress
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.answers.response_items import Change, Output, ResponseObject
from server.errors import ApiError
from server.http.sse import SSE
from server.output.choices import progress_of
from server.output.response_record import LAST, Event, closing, delta_frame, delta_head, frame, opening

OnEnd = Callable[[dict[str, Any], bytes], None]  # (last state, the cuts between deltas)


class ResponseEvents:
    """Frames of one streamed response."""

    form = SSE
    done = b""

    def __init__(self, answer: Answer, shape: ResponseObject, on_end: OnEnd) -> None:
        self.answer = answer
        self.shape = shape
        self.on_end = on_end
        self.number = 0  # number of the next event
        self.output = Output(shape)
        self.opened = 0  # number of items whose first event was sent
        self.head = b""  # the constant beginning of the open item's deltas

    def framed(self, events: list[Event]) -> bytes:
        frames = [frame(kind, self.number + at, fields) for at, (kind, fields) in enumerate(events)]
        self.number += len(frames)
        return b"".join(frames)

    def chunks(self, choice: Choice) -> bytes:
        events, _, entries = choice.drain_events()
        frames = b"" if choice.started else self.start(choice)
        frames += self.grow(self.output.grow(events, entries))
        return frames if choice.finish_reason is None else frames + self.finish()

    def plain(self, choice: Choice) -> None:
        """No lane: each event has its own number."""

    def start(self, choice: Choice) -> bytes:
        choice.started = True
        begun = self.shape.at("in_progress")
        return self.framed([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def grow(self, changes: list[Change]) -> bytes:
        """Frames of the deltas, and of the events that begin and end items."""
        frames: list[bytes] = []
        for item, text, logprobs in changes:
            if not self.opened or item is not self.output.items[self.opened - 1]:
                frames.append(self.next_item())
            if text or logprobs != b"[]":
                frames.append(delta_frame(self.head, item.body["type"], self.number, text, logprobs))
                self.number += 1
        return b"".join(frames)

    def next_item(self) -> bytes:
        at, items = self.opened, self.output.items
        self.opened += 1
        frames = self.framed(closing(items[at - 1].ended("completed"), at - 1)) if at else b""
        body = items[at].body
        self.head = delta_head(body, at)
        return frames + self.framed(opening(body, at))

    def finish(self) -> bytes:
        """Frames of every `.done`, and of the last state."""
        frames = self.grow(self.output.finish())
        last = self.shape.ended(self.answer, self.output)
        at = len(last["output"]) - 1
        return frames + self.framed(closing(last["output"][at], at)) + self.end(last)

    def end(self, last: dict[str, Any]) -> bytes:
        self.on_end(last, self.output.cuts)
        return self.framed([(LAST.get(last["status"], "response.incomplete"), {"response": last})])

    def progress(self, choice: Choice, progress: Progress) -> bytes:
        frames = b"" if choice.started else self.start(choice)
        return frames + self.framed([("response.prompt_progress", progress_of(progress))])

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        choice = self.answer.choices[0]
        frames = b"" if choice.started else self.start(choice)
        return frames + self.end(self.shape.failed(error))
