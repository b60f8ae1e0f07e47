"""ResponseRecord: the events of one response, told again from any number on, while it runs and after it has ended.

Owner: loop. In: the text of each delta and, at the end, the last state. Out: frames with the numbers that the
response's own stream had, so a client that was cut off goes on with `starting_after`. Nothing is kept but the texts
(once ended: the final body and where the deltas were cut); log-probabilities are told whole, with `.done`.

    0 created, 1 in_progress | 2 item added, 3 part added | 4 delta ... | text done, part done, item done | completed
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable
from typing import Any

import orjson

dumps = orjson.dumps
Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]  # its type, and its fields beside the number

LAST = {"completed": "response.completed", "failed": "response.failed"}  # any other end: response.incomplete
FIRST_DELTA = 4
NO_LOGPROBS = orjson.Fragment(b"[]")


def text_content(text: str, logprobs: orjson.Fragment) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def frame(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    """One event as it stands in a stream."""
    data = dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def cuts_of(texts: Iterable[str]) -> bytes:
    """The lengths of the deltas, for `ResponseRecord.of`."""
    return array.array("I", [len(text) for text in texts]).tobytes()


class ResponseRecord:
    """Owner: loop. `watchers` are called after each change."""

    def __init__(self, begun: dict[str, Any], item_id: str) -> None:
        self.begun = begun  # the response in progress
        self.item_id = item_id
        self.texts: list[str] = []  # of each delta
        self.last: dict[str, Any] | None = None  # the response at its end
        self.watchers: set[Callable[[], None]] = set()

    @classmethod
    def of(cls, body: bytes, cuts: bytes) -> ResponseRecord:
        """Of a stored response that has ended."""
        last = orjson.loads(body)
        begun = {**last, "status": "in_progress", "output": [], "usage": None, "error": None}
        begun["incomplete_details"] = None
        output = last["output"]
        record = cls(begun, output[0]["id"] if output else "")
        text, at = (output[0]["content"][0]["text"] if output else ""), 0
        for length in array.array("I", cuts):
            record.texts.append(text[at : at + length])
            at += length
        record.last = last
        return record

    @property
    def cuts(self) -> bytes:
        return cuts_of(self.texts)

    def grow(self, text: str) -> None:
        if text:
            self.texts.append(text)
            self._tell()

    def end(self, last: dict[str, Any]) -> None:
        self.last = last
        self._tell()

    def _tell(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    def since(self, number: int) -> tuple[bytes, int]:
        """(frames of the events from `number` on, the number of the next one)."""
        ended = self.last is not None
        has_item = bool(self.texts) or bool(self.last and self.last["output"])
        head = self._head(has_item)
        frames = [frame(kind, at, fields) for at, (kind, fields) in enumerate(head) if at >= number]
        end = len(head) + (len(self.texts) if has_item else 0)
        if has_item:
            begin = max(number, FIRST_DELTA)
            for at in range(begin, end):
                frames.append(self._delta(at))
        tail = self._tail() if ended else []
        frames += [frame(kind, end + at, fields) for at, (kind, fields) in enumerate(tail) if end + at >= number]
        return b"".join(frames), max(number, end + len(tail))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _delta(self, at: int) -> bytes:
        """As a stream writes it, whose constant part comes first."""
        kind = "response.output_text.delta"
        told = {"delta": self.texts[at - FIRST_DELTA], "logprobs": [], "sequence_number": at}
        return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **self._place, **told}) + b"\n\n"

    def _head(self, has_item: bool) -> list[Event]:
        events: list[Event] = [("response.created", {"response": self.begun})]
        events.append(("response.in_progress", {"response": self.begun}))
        if has_item:
            item = {"id": self.item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            events.append(("response.output_item.added", {"output_index": 0, "item": item}))
            events.append(("response.content_part.added", {**self._place, "part": text_content("", NO_LOGPROBS)}))
        return events

    def _tail(self) -> list[Event]:
        last = self.last
        assert last is not None
        events: list[Event] = []
        for item in last["output"]:
            (part,) = item["content"]
            done = {**self._place, "text": part["text"], "logprobs": part["logprobs"]}
            events.append(("response.output_text.done", done))
            events.append(("response.content_part.done", {**self._place, "part": part}))
            events.append(("response.output_item.done", {"output_index": 0, "item": item}))
        events.append((LAST.get(last["status"], "response.incomplete"), {"response": last}))
        return events
