"""ResponseRecord: replays the events of one response from any number on, while it runs and after it has ended.

Owner: loop. In: the output items as they grow and, at the end, the last state. Out: frames with the numbers of the
response's own stream, so a client that was disconnected can continue with `starting_after`. The record stores the
items' texts and log-probabilities (after the end: the final body and the lengths of the deltas). Replayed deltas have
no log-probabilities; only `.done` events have.

    0 created, 1 in_progress | item added, part added | delta ... | text done, part done, item done | ... | completed
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from server.render.items import sealed

dumps = orjson.dumps
Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]  # (type, fields without sequence_number)

LAST = {"completed": "response.completed", "failed": "response.failed"}  # any other end: response.incomplete
SEALED = "encrypted_content"  # field of reasoning, if `include` requests it
NO_LOGPROBS = orjson.Fragment(b"[]")
# type of an item -> (name of its text's events, key of its text, or "" if the text is a content part)
TEXT_EVENTS = {
    "message": ("response.output_text", ""),
    "reasoning": ("response.reasoning_text", ""),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def text_content(text: str, logprobs: orjson.Fragment) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def part_of(kind: str, text: str, logprobs: orjson.Fragment) -> Item:
    """The content part of a message or of reasoning."""
    return text_content(text, logprobs) if kind == "message" else {"type": "reasoning_text", "text": text}


class OutputItem:
    """One item as it grows. `body`: the item at its beginning."""

    __slots__ = ("body", "logprobs", "texts")

    def __init__(self, body: Item) -> None:
        self.body = body
        self.texts: list[str] = []  # one per delta
        self.logprobs: list[bytes] = []  # JSON without its brackets

    def ended(self, status: str) -> Item:
        """The item with all of its text."""
        text, kind = "".join(self.texts), self.body["type"]
        key = TEXT_EVENTS[kind][1]
        if key:
            return {**self.body, "status": status, key: text}
        logprobs = orjson.Fragment(b"[" + b",".join(self.logprobs) + b"]")
        seal = {SEALED: sealed(text)} if SEALED in self.body else {}
        return {**self.body, "status": status, "content": [part_of(kind, text, logprobs)], **seal}


def begun_of(body: Item) -> Item:
    """The body that an item had at its beginning, from its final body."""
    key = TEXT_EVENTS[body["type"]][1]
    seal = {SEALED: ""} if SEALED in body else {}
    return {**body, "status": "in_progress", **({key: ""} if key else {"content": []}), **seal}


def place_of(body: Item, at: int) -> Item:
    place = {"item_id": body["id"], "output_index": at}
    return place if TEXT_EVENTS[body["type"]][1] else {**place, "content_index": 0}


def opening(body: Item, at: int) -> list[Event]:
    """The events before an item's text."""
    events: list[Event] = [("response.output_item.added", {"output_index": at, "item": body})]
    kind = body["type"]
    if not TEXT_EVENTS[kind][1]:
        part = part_of(kind, "", NO_LOGPROBS)
        events.append(("response.content_part.added", {**place_of(body, at), "part": part}))
    return events


def closing(body: Item, at: int) -> list[Event]:
    """The events after an item's text; `body` is the final item."""
    kind = body["type"]
    name, key = TEXT_EVENTS[kind]
    place = place_of(body, at)
    last = ("response.output_item.done", {"output_index": at, "item": body})
    if key:
        named = {"name": body["name"]} if kind == "function_call" else {}
        return [(f"{name}.done", {**place, **named, key: body[key]}), last]
    (part,) = body["content"]
    logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
    done = (f"{name}.done", {**place, "text": part["text"], **logprobs})
    return [done, ("response.content_part.done", {**place, "part": part}), last]


def frame(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    """The frame of one event in a stream."""
    data = dumps({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def delta_head(body: Item, at: int) -> bytes:
    """The constant beginning of an item's delta frames; the text follows."""
    kind = TEXT_EVENTS[body["type"]][0] + ".delta"
    head = {"type": kind, **place_of(body, at)}
    return b"event: " + kind.encode() + b"\ndata: " + dumps(head)[:-1] + b',"delta":'


def delta_frame(head: bytes, kind: str, number: int, text: str, logprobs: bytes = b"[]") -> bytes:
    logprob_text = b',"logprobs":' + logprobs if kind == "message" else b""
    return head + dumps(text) + logprob_text + b',"sequence_number":%d}\n\n' % number


def cuts_of(items: Iterable[Iterable[str]]) -> bytes:
    """Encode the number of deltas of each item, and their lengths, for `ResponseRecord.of`."""
    numbers: list[int] = []
    for texts in items:
        lengths = [len(text) for text in texts]
        numbers += [len(lengths), *lengths]
    return array.array("I", numbers).tobytes()


def text_of(body: Item) -> str:
    """The whole text of a final item."""
    key = TEXT_EVENTS[body["type"]][1]
    return body[key] if key else body["content"][0]["text"]


class ResponseRecord:
    """The events of one response. Owner: loop. `watchers` are called after each change; response_items.Output adds
    `items`.
    """

    def __init__(self, begun: dict[str, Any], items: list[OutputItem]) -> None:
        self.begun = begun  # the response in progress
        self.items = items
        self.last: dict[str, Any] | None = None  # the final response
        self.watchers: set[Callable[[], None]] = set()

    @classmethod
    def of(cls, body: bytes, cuts: bytes) -> ResponseRecord:
        """The record of a stored response that has ended."""
        last = orjson.loads(body)
        begun = {**last, "status": "in_progress", "output": [], "usage": None, "error": None}
        begun["incomplete_details"] = None
        numbers = iter(array.array("I", cuts))
        items = []
        for output in last["output"]:
            item, text, at = OutputItem(begun_of(output)), text_of(output), 0
            for length in [next(numbers) for _ in range(next(numbers, 0))]:
                item.texts.append(text[at : at + length])
                at += length
            items.append(item)
        record = cls(begun, items)
        record.last = last
        return record

    @property
    def cuts(self) -> bytes:
        return cuts_of(item.texts for item in self.items)

    def notify(self) -> None:
        """Call the watchers: items have grown or ended."""
        for watcher in list(self.watchers):
            watcher()

    def end(self, last: dict[str, Any]) -> None:
        self.last = last
        self.notify()

    def since(self, number: int) -> tuple[bytes, int]:
        """(frames of the events from `number` on, the number of the next one)."""
        emitted = _Emitted(number)
        emitted.add(
            [("response.created", {"response": self.begun}), ("response.in_progress", {"response": self.begun})]
        )
        ended = [] if self.last is None else self.last["output"]
        for at, item in enumerate(self.items):
            emitted.add(opening(item.body, at))
            emitted.add_deltas(item, at)
            if at < len(ended):
                emitted.add(closing(ended[at], at))
            elif at < len(self.items) - 1:
                emitted.add(closing(item.ended("completed"), at))
        if self.last is not None:
            emitted.add([(LAST.get(self.last["status"], "response.incomplete"), {"response": self.last})])
        return b"".join(emitted.frames), max(number, emitted.next)


class _Emitted:
    """Collects the frames of events from a number on."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.next = 0
        self.frames: list[bytes] = []

    def add(self, events: list[Event]) -> None:
        for kind, fields in events:
            if self.next >= self.begin:
                self.frames.append(frame(kind, self.next, fields))
            self.next += 1

    def add_deltas(self, item: OutputItem, at: int) -> None:
        first = max(0, self.begin - self.next)
        if first < len(item.texts):
            head, kind = delta_head(item.body, at), item.body["type"]
            for number, text in enumerate(item.texts[first:], self.next + first):
                self.frames.append(delta_frame(head, kind, number, text))
        self.next += len(item.texts)
