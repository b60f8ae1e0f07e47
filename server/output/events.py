"""Events: what the parsers of a model's output say, and the Sink that a parser says it to.

Owner: loop, one Sink per choice. In: pieces of reasoning, of content and of calls, in the order of the model's text.
Out: events, neighbours of one kind merged, ready for any dialect. The Sink keeps the rules that hold for every
parser: white space around calls is no content, a call has an id, calls beyond the first are dropped where the client
wants one only, calls and arguments beyond the server's limits are content (SECURITY S31), and a marker token inside a
text shows as its spelling or not at all.

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
    call: int  # its number in the answer
    id: str
    name: str


class CallArguments(NamedTuple):
    call: int  # its number in the answer
    text: str


class CallEnd(NamedTuple):
    call: int  # its number in the answer


Event = Reasoning | Content | CallStart | CallArguments | CallEnd
NewId = Callable[[str, int], str]  # (name of the tool, number of the call in this answer) -> id


class TooManyCalls(Exception):
    """A call begins beyond the limit: its text buffered in the Source, and all text after it, is content."""


class Spelling(NamedTuple):
    """What marker characters (output/markers.py) become outside of markers: in a text, and in a JSON string."""

    text: Mapping[int, str]
    json: Mapping[int, str]


class CallBounds(NamedTuple):
    """How many calls an answer may have; 0: any number."""

    most: int  # those beyond are dropped, for the client wants no more
    limit: int  # those beyond are content
    argument_bytes: int  # of one call; those beyond are content


PLAIN = Spelling({}, {})


@dataclass(slots=True)
class OpenCall:
    """What is known of the newest call's arguments."""

    size: int = 0  # bytes
    begun: bool = False
    cut: bool = False  # they are content from here on


class Sink:
    """What parsers write to. `spaced`: white space is held until it is clear that no call follows."""

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
        self.num_calls = 0  # begun, the dropped ones included
        self.after_call = False  # no text has come since the newest call's last word
        self.thinking = False  # the newest token is reasoning
        self.muted = False  # content is left out from here on
        self._new_id = new_id
        self._bounds = CallBounds(most_calls, call_limit, argument_limit)
        self._newest = OpenCall()
        self._spaced = spaced
        self._spelling = spelling
        self._shows_reasoning = shows_reasoning
        self._events: list[Event] = []
        self._parts: list[str] = []  # of the newest event, still growing
        self._kind: type[Reasoning] | type[Content] | type[CallArguments] | None = None
        self._space: list[str] = []
        self._rejected = False  # the newest opening marker began no call

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
        """A call begins. Raises TooManyCalls where calls are bounded and not dropped."""
        if self.is_full:
            raise TooManyCalls
        self._space.clear()
        self._close()
        self._newest = OpenCall()
        self._rejected = False
        self.after_call = True
        if not self._dropped:
            self._events.append(CallStart(self.num_calls, self._new_id(name, self.num_calls), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON text."""
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
        """The call is complete; without arguments, they are an empty object."""
        if not self._newest.begun:
            self.arguments("{}")
        self._close()
        if not self._newest.cut and (self.num_calls <= self._bounds.most or not self._bounds.most):
            self._events.append(CallEnd(self.num_calls - 1))

    def reject(self, text: str) -> None:
        """What looked like a call and is none."""
        self._rejected = True
        self.content(text)

    def stray(self, marker: str) -> None:
        """A closing marker outside of calls: content where its opening marker was, else nothing."""
        if self._rejected:
            self.content(marker)
        else:
            self._space.clear()

    def drop_space(self) -> None:
        """White space in front of a marker that is no content."""
        self._space.clear()

    def finish(self) -> None:
        """White space at the end of an answer without calls is content."""
        if self._space and not self.num_calls:
            self._add(Content, "".join(self._space))
        self._space.clear()

    @property
    def begun(self) -> bool:
        """Whether the newest call has arguments."""
        return self._newest.begun

    @property
    def is_full(self) -> bool:
        """Whether another call is content."""
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
    """The same with neighbours of one kind put together."""
    found: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "call", 0))):
        first, *rest = group
        if rest and isinstance(first, Reasoning | Content | CallArguments):
            first = first._replace(text=first.text + "".join(getattr(event, "text", "") for event in rest))
        found.append(first)
    return found


@dataclass(slots=True)
class Call:
    """A call as far as it is known."""

    id: str
    name: str
    arguments: str = ""
    parts: list[str] = field(default_factory=list)


class Said:
    """Events put together: reasoning, content and calls of an answer that is not streamed."""

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
