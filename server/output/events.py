"""Events: the output of parsers of a model's text, and the Sink to which a parser writes.

Owner: loop, one Sink per choice. In: pieces of reasoning, of content and of calls, in the order of the model's text.
Out: events, adjacent ones of one kind merged, for any API. The Sink has the rules common to all parsers: white space
around calls is no content; a call has an id; further calls are dropped if the client wants only one; calls and
arguments beyond the server's limits become content (SECURITY S31); a marker token inside a text is written as its
spelling or left out.

    reasoning(text) · content(text) · call_start(call, id, name) · call_arguments(call, text) · call_end(call)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int  # index of the call in the answer
    id: str
    name: str


class CallArguments(NamedTuple):
    call: int  # index of the call in the answer
    text: str


class CallEnd(NamedTuple):
    call: int  # index of the call in the answer


Event = Reasoning | Content | CallStart | CallArguments | CallEnd
NewId = Callable[[str, int], str]  # (name of the tool, index of the call in this answer) -> id


class TooManyCalls(Exception):
    """A call begins beyond the limit: its text buffered in the Source, and all text after it, becomes content."""


class Spelling(NamedTuple):
    """Replacements for marker characters (output/markers.py) outside of markers: in a text, and in a JSON string."""

    text: Mapping[int, str]
    json: Mapping[int, str]


class CallBounds(NamedTuple):
    """Bounds on the calls of an answer; 0: no bound."""

    most: int  # further calls are dropped: the client wants no more
    limit: int  # further calls become content
    argument_bytes: int  # the most bytes of one call; further bytes become content


PLAIN = Spelling({}, {})


@dataclass(slots=True)
class OpenCall:
    """State of the newest call's arguments."""

    size: int = 0  # in bytes
    begun: bool = False
    ended: bool = True
    cut: bool = False  # whether further arguments become content


class Sink:
    """Collects the events of parsers. `spaced`: white space is held until it is clear that no call follows."""

    __slots__ = (
        "_bounds",
        "_events",
        "_kind",
        "_new_id",
        "_newest",
        "_parts",
        "_rejected",
        "_shows_reasoning",
        "_space",
        "_spaced",
        "_spelling",
        "after_call",
        "muted",
        "num_calls",
        "thinking",
    )  # fmt: skip

    def __init__(
        self,
        new_id: NewId,
        *,
        spaced: bool,
        most_calls: int = 0,
        call_limit: int = 0,
        argument_limit: int = 0,
        shows_reasoning: bool = True,
        spelling: Spelling = PLAIN,
    ) -> None:
        self.num_calls = 0  # calls begun, including dropped ones
        self.after_call = False  # whether no text has come since the newest call's arguments
        self.thinking = False  # whether the newest token is reasoning
        self.muted = False  # whether further content is left out
        self._new_id = new_id
        self._bounds = CallBounds(most_calls, call_limit, argument_limit)
        self._newest = OpenCall()
        self._spaced = spaced
        self._spelling = spelling
        self._shows_reasoning = shows_reasoning
        self._events: list[Event] = []
        self._parts: list[str] = []  # texts of the newest event, which still grows
        self._kind: type[Reasoning] | type[Content] | type[CallArguments] | None = None
        self._space: list[str] = []
        self._rejected = False  # whether the newest opening marker began no call

    def take(self) -> list[Event]:
        """Events since the last call."""
        if self._kind is not None:
            self._close()
        found, self._events = self._events, []
        return found

    def reasoning(self, text: str) -> None:
        if self._shows_reasoning:
            self._add(Reasoning, text)

    def content(self, text: str) -> None:
        if self.muted:
            return
        if not (self._spaced and (self._space or text[-1:].isspace())):  # nearly every token
            self._add(Content, text)
        elif text.isspace():
            self._space.append(text)
        elif text:
            stripped = text.rstrip()
            self._add(Content, "".join(self._space) + stripped)
            self._space = [text[len(stripped) :]] if len(stripped) < len(text) else []

    def call(self, name: str) -> None:
        """Begin a call. Raises TooManyCalls if the limit is reached, unless further calls are dropped."""
        if self.is_full:
            raise TooManyCalls
        self._space.clear()
        self._close()
        self._newest = OpenCall(ended=False)
        self._rejected = False
        self.after_call = True
        if not self._dropped:
            self._events.append(CallStart(self.num_calls, self._new_id(name, self.num_calls), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments' JSON."""
        newest, bounds = self._newest, self._bounds
        newest.begun = True
        if 0 < bounds.most < self.num_calls:
            return
        newest.size += len(text) if text.isascii() else len(text.encode(errors="replace"))
        if newest.size <= bounds.argument_bytes or not bounds.argument_bytes:
            self._add(CallArguments, text)
            return
        if not newest.cut:
            self.end_call()
            newest.cut = True
        self.content(text)

    def end_call(self) -> None:
        """End the call; a call without arguments gets an empty object."""
        if not self._newest.begun:
            self.arguments("{}")
        self._newest.ended = True
        self._close()
        if not self._newest.cut and (self.num_calls <= self._bounds.most or not self._bounds.most):
            self._events.append(CallEnd(self.num_calls - 1))

    def reject(self, text: str) -> None:
        """Turn text that began like a call into content."""
        self._rejected = True
        self.content(text)

    def stray(self, marker: str) -> None:
        """Handle a closing marker outside of calls: content if its opening marker was content, otherwise left out."""
        if self._rejected:
            self.content(marker)
        else:
            self._space.clear()

    def drop_space(self) -> None:
        """Drop white space before a marker."""
        self._space.clear()

    def finish(self) -> None:
        """End the answer; if it has no calls, held white space becomes content."""
        if self._space and not self.num_calls:
            self._add(Content, "".join(self._space))
        self._space.clear()

    @property
    def in_call(self) -> bool:
        """Whether the newest call has not ended."""
        return not self._newest.ended

    @property
    def begun(self) -> bool:
        """Whether the newest call has arguments."""
        return self._newest.begun

    @property
    def is_full(self) -> bool:
        """Whether another call becomes content."""
        return 0 < self._bounds.limit <= self.num_calls and not self._dropped

    @property
    def _dropped(self) -> bool:
        return 0 < self._bounds.most <= self.num_calls

    def _add(self, kind: type[Reasoning] | type[Content] | type[CallArguments], text: str) -> None:
        if not text:
            return
        if not text.isascii():
            text = text.translate(self._spelling.json if kind is CallArguments else self._spelling.text)
        if self._kind is not kind:
            self._close()
            self._kind = kind
            self.after_call = kind is CallArguments
        self._parts.append(text)

    def _close(self) -> None:
        kind, self._kind = self._kind, None
        if kind is None:
            return
        text = self._parts[0] if len(self._parts) == 1 else "".join(self._parts)
        self._parts = []
        if text and kind is CallArguments:
            self._events.append(CallArguments(self.num_calls - 1, text))
        elif text:
            self._events.append(Reasoning(text) if kind is Reasoning else Content(text))


def merged(events: list[Event]) -> list[Event]:
    """The events with adjacent ones of one kind merged."""
    found: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "call", 0))):
        first, *rest = group
        if rest and isinstance(first, Reasoning | Content | CallArguments):
            first = first._replace(text=first.text + "".join(getattr(event, "text", "") for event in rest))
        found.append(first)
    return found


@dataclass(slots=True)
class Call:
    """A call collected so far."""

    id: str
    name: str
    arguments: str = ""
    parts: list[str] = field(default_factory=list)


class Said:
    """The merged events of an answer that is not streamed: reasoning, content and calls."""

    def __init__(self, events: list[Event]) -> None:
        self.reasoning = "".join(event.text for event in events if type(event) is Reasoning)
        self.content = "".join(event.text for event in events if type(event) is Content)
        self.calls: list[Call] = []
        for event in events:
            if type(event) is CallStart:
                self.calls.append(Call(event.id, event.name))
            elif type(event) is CallArguments:
                self.calls[event.call].parts.append(event.text)
        for call in self.calls:
            call.arguments = "".join(call.parts)
