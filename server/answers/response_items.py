"""Response objects: the echoed fields of the request, output items, usage, and the response's status.

Owner: loop. In: the checked request, and the events of the one Choice of an Answer. Out: items, and dicts for orjson.
Nested values of a client are only echoed if they were checked first (metadata, tools). Reasoning, text and calls each
become an item, in the order of the model's output; a response has at least one item, which may be an empty message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import orjson

from engine.base.request import TokenLogprob
from server.answers.answer import Answer
from server.answers.choice import Choice
from server.errors import ApiError
from server.output.completed import completed
from server.output.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from server.output.logprobs import TokenNames
from server.output.response_record import SEALED, Item, OutputItem, cuts_of

Change = tuple[OutputItem, str, bytes]  # (the item that grew, the added text, its log-probabilities)


class ResponseObject:
    """One response: its constant fields, and methods for its states."""

    def __init__(
        self, name: str, echo: dict[str, Any], names: TokenNames, top: int, tools: Mapping[str, Item] | None = None
    ) -> None:
        self.name = name
        self.echo = echo  # created_at and what the client sent, checked, with defaults
        self.names = names
        self.top = top  # log-probabilities per token
        self.seals = False  # whether reasoning is also sent as one sealed text
        self.tools = tools or {}  # name that the model calls -> the client's tool (render/items.py)

    def at(
        self,
        status: str,
        output: Sequence[Item] = (),
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
        incomplete: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "response",
            **self.echo,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": list(output),
            "usage": usage,
        }

    def whole(self, answer: Answer) -> tuple[dict[str, Any], bytes]:
        """(the response's final state, the boundaries between its deltas) of an answer that was not drained before."""
        output = Output(self)
        events, _, entries = answer.choices[0].drain_events()
        output.grow(events, entries)
        output.finish()
        return self.ended(answer, output), output.cuts

    def encoded(self, entries: list[TokenLogprob]) -> bytes:
        """Log-probabilities as JSON, encoded once: several events and the store repeat them."""
        return orjson.dumps(self.names.chat(entries, self.top)["content"]) if entries else b"[]"

    def ended(self, answer: Answer, output: Output) -> dict[str, Any]:
        """The final state for a choice that has ended."""
        status, incomplete = status_of(answer.choices[0])
        own = "completed" if status == "completed" else "incomplete"
        last = len(output.items) - 1
        items = [item.ended(own if at == last else "completed") for at, item in enumerate(output.items)]
        return self.at(status, items, usage=usage_of(answer), incomplete=incomplete)

    def failed(self, error: ApiError) -> dict[str, Any]:
        return self.at("failed", error={"code": code_of(error), "message": error.message})


class Output:
    """The items of one response as they grow. Owner: loop."""

    def __init__(self, shape: ResponseObject) -> None:
        self.shape = shape
        self.items: list[OutputItem] = []
        self._open: type[Event] | None = None  # kind of events that extend the newest item
        self._custom: list[str] = []  # JSON pieces of a call whose input is free text
        self._waiting: list[TokenLogprob] = []

    @property
    def cuts(self) -> bytes:
        """The boundaries of the deltas, for the store."""
        return cuts_of(item.texts for item in self.items)

    def grow(self, events: Sequence[Event], entries: list[TokenLogprob]) -> list[Change]:
        """Add events to the items; log-probabilities are sent only with text."""
        self._waiting += entries
        changes: list[Change] = []
        for event in events:
            item = self._item(event)
            logprobs = b"[]"
            if type(event) is Content:
                logprobs = self._logprobs(item)
            else:
                self._waiting.clear()
            text = self._text(event, item)
            if text:
                item.texts.append(text)
            changes.append((item, text, logprobs))
        return changes

    def finish(self) -> list[Change]:
        """After the last event: add a message if there is no item, and send log-probabilities that waited for
        a text.
        """
        changes: list[Change] = []
        if self._custom:
            changes += self.grow([CallEnd(0)], [])
        if not self.items:
            changes += self.grow([Content("")], [])
        elif self._waiting and self._open is Content:
            item = self.items[-1]
            item.texts.append("")
            changes.append((item, "", self._logprobs(item)))
        return changes

    def _logprobs(self, item: OutputItem) -> bytes:
        shown = self.shape.encoded(self._waiting)
        if self._waiting:
            item.logprobs.append(shown[1:-1])
            self._waiting = []
        return shown

    def _item(self, event: Event) -> OutputItem:
        """The item that an event extends; a new item if the newest is of another kind."""
        kind = type(event)
        if kind in (CallArguments, CallEnd):
            return self.items[-1]
        if kind is CallStart or kind is not self._open:
            self._open = kind
            self.items.append(OutputItem(self._begun(event)))
        return self.items[-1]

    def _begun(self, event: Event) -> Item:
        key = uuid4().hex
        if isinstance(event, Reasoning):
            seal = {SEALED: ""} if self.shape.seals else {}
            begun = {"id": f"rs_{key}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            return {**begun, **seal}
        if not isinstance(event, CallStart):
            return {"id": f"msg_{key}", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        known = self.shape.tools.get(event.name, {})
        body = {"status": "in_progress", "call_id": event.id, "name": known.get("name", event.name)}
        space = {"namespace": known["namespace"]} if "namespace" in known else {}
        if known.get("type") == "custom":
            return {"id": f"ctc_{key}", "type": "custom_tool_call", **body, "input": "", **space}
        return {"id": f"fc_{key}", "type": "function_call", **body, "arguments": "", **space}

    def _text(self, event: Event, item: OutputItem) -> str:
        """The text that an event adds to its item; a custom tool's input is added at the end of its call."""
        custom = item.body["type"] == "custom_tool_call"
        if custom and isinstance(event, CallArguments):
            self._custom.append(event.text)
            return ""
        if isinstance(event, CallEnd):
            text = free_text("".join(self._custom)) if custom else ""
            self._custom.clear()
            return text
        return "" if isinstance(event, CallStart) else event.text


def free_text(arguments: str) -> str:
    """The input of a custom tool, out of its call's JSON; "" if the call was truncated before its input."""
    found = completed(arguments)
    text = found.get("input")
    if isinstance(text, str):
        return text
    return arguments if found or not arguments.startswith("{") else ""


def status_of(choice: Choice) -> tuple[str, str | None]:
    """(status, reason if incomplete)."""
    if choice.finish_reason == "stop":
        return "completed", None
    if choice.finish_reason == "abort":
        return "cancelled", None
    return "incomplete", "max_output_tokens"


def code_of(error: ApiError) -> str:
    """The protocol's code for an error."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def usage_of(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
