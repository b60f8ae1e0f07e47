"""Events of a streamed response, in the exact order of API.md section 11, numbered from 0.

Owner: loop, one per stream. In: the one Choice of an Answer as it grows. Out: frames. The text is kept until the end,
because every `.done` repeats it; the last event is handed to `on_end` before its frame leaves, so that a client who
has read it finds the response stored.

    created, in_progress | item added, part added | delta ... | text done, part done, item done | completed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from engine.request import TokenLogprob
from server.answer import Answer
from server.choice import Choice
from server.errors import ApiError
from server.output.response_items import ResponseObject
from server.output.response_record import LAST, NO_LOGPROBS, frame, text_content

dumps = orjson.dumps
OnEnd = Callable[[dict[str, Any], list[str]], None]  # the last state, and the text of each delta


class ResponseEvents:
    """Frames of one streamed response."""

    done = b""

    def __init__(self, answer: Answer, shape: ResponseObject, on_end: OnEnd) -> None:
        self.answer = answer
        self.shape = shape
        self.on_end = on_end
        self.number = 0  # of the next event
        self.in_item = False
        self.texts: list[str] = []
        self.waiting: list[TokenLogprob] = []
        self.logprobs: list[bytes] = []  # JSON without its brackets
        self.place = {"item_id": shape.item_id, "output_index": 0, "content_index": 0}
        head = {"type": "response.output_text.delta", **self.place}
        self.delta_head = b"event: response.output_text.delta\ndata: " + dumps(head)[:-1] + b',"delta":'

    def event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return frame(kind, self.number - 1, fields)

    def chunks(self, choice: Choice) -> bytes:
        text, _, entries = choice.drain()
        over = choice.finish_reason is not None
        frames = b"" if choice.started else self.start(choice)
        self.waiting += entries
        if not self.in_item and (text or over):
            frames += self.open_item()
        if text or (over and self.waiting):
            frames += self.delta(text)
        return frames + self.finish() if over else frames

    def plain(self, choice: Choice) -> None:
        """Each event has its number."""

    def start(self, choice: Choice) -> bytes:
        choice.started = True
        begun = self.shape.at("in_progress")
        return self.event("response.created", response=begun) + self.event("response.in_progress", response=begun)

    def open_item(self) -> bytes:
        self.in_item = True
        item = {**self.shape.message("", NO_LOGPROBS, "in_progress"), "content": []}
        return self.event("response.output_item.added", output_index=0, item=item) + self.event(
            "response.content_part.added", **self.place, part=text_content("", NO_LOGPROBS)
        )

    def delta(self, text: str) -> bytes:
        """With the log-probabilities of all tokens since the last one; tokens without text yet have waited here."""
        shown = self.shape.encoded(self.waiting)
        if self.waiting:
            self.logprobs.append(shown[1:-1])
            self.waiting = []
        self.texts.append(text)
        frame = self.delta_head + dumps(text) + b',"logprobs":' + shown
        frame += b',"sequence_number":%d}\n\n' % self.number
        self.number += 1
        return frame

    def finish(self) -> bytes:
        """Every `.done`, and the last state."""
        text, shape = "".join(self.texts), self.shape
        logprobs = orjson.Fragment(b"[" + b",".join(self.logprobs) + b"]")
        last = shape.ended(self.answer, text, logprobs)
        (item,) = last["output"]
        frames = self.event("response.output_text.done", **self.place, text=text, logprobs=logprobs)
        frames += self.event("response.content_part.done", **self.place, part=item["content"][0])
        frames += self.event("response.output_item.done", output_index=0, item=item)
        return frames + self.end(last)

    def end(self, last: dict[str, Any]) -> bytes:
        self.on_end(last, self.texts)
        return self.event(LAST.get(last["status"], "response.incomplete"), response=last)

    def usage(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        choice = self.answer.choices[0]
        frames = b"" if choice.started else self.start(choice)
        return frames + self.end(self.shape.failed(error))
