"""Conversation: chat messages made from another protocol's blocks or items, with the client's path of each.

Owner: any thread; one per request. In: turns as render/blocks.py and render/items.py read them. Out: messages for
`Renderer.chat`. Consecutive turns of one role become one message, because many templates require alternating roles.
Media of a tool's result move into a following user message, because most templates print a tool message as text. Errors
of the renderer name the paths of the client's request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from mm.errors import MediaError
from server.render.chat import Renderer
from server.render.errors import RenderError, invalid

# The renderer's paths: a message, its content, a part of it and the part's payload; a call; other fields of a message.
_HELD = r"\.(?:text|image_url(?:\.url)?|file)\b"
_INSIDE = rf"\.content(?:\[(\d+)\]({_HELD})?)?|\.tool_calls\[(\d+)\]|\.(?:reasoning|name|tool_call_id)\b"
_WHERE = re.compile(rf"messages\[(\d+)\]({_INSIDE})?")
_MARK = "a-text-inside"
_SYSTEM_INSIDE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "system", "content": _MARK},
    {"role": "user", "content": "d"},
]
_CALL: dict[str, Any] = {"id": "abcdefgh9", "type": "function", "function": {"name": "f", "arguments": {}}}
_BEHIND_TOOL: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh9", "name": "f", "content": "b"},
    {"role": "user", "content": _MARK},
]
_PARTED = [*_BEHIND_TOOL[:-1], {"role": "assistant", "content": ""}, _BEHIND_TOOL[-1]]
_tried: WeakKeyDictionary[Renderer, dict[str, bool]] = WeakKeyDictionary()  # probe -> whether the template passes


class Part(NamedTuple):
    """A content part of a chat message, and its path in the client's request."""

    content: dict[str, Any]
    path: str  # path of the block or part
    held: str = ""  # path of its text, URL or data; "": the renderer's key

    @property
    def kind(self) -> str:
        return self.content["type"]


def text_part(text: str, path: str, held: str = "") -> Part:
    return Part({"type": "text", "text": text}, path, held)


@dataclass(slots=True)
class Turn:
    """One message while it is being built."""

    role: str
    path: str
    parts: list[Part]
    calls: list[Part] = field(default_factory=list)
    reasoning: list[Part] = field(default_factory=list)
    answers: str = ""  # id of the call, in a tool message
    name: str = ""  # name of the tool, in a tool message

    def append(self, parts: list[Part]) -> None:
        """Add parts of the same role; a newline separates two texts."""
        if parts and self.parts and self.parts[-1].kind == parts[0].kind == "text":
            first, *rest = parts
            parts = [text_part("\n" + first.content["text"], first.path, first.held), *rest]
        self.parts += parts

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content()}
        if self.calls:
            message["tool_calls"] = [call.content for call in self.calls]
        if self.reasoning:
            message["reasoning_content"] = "\n".join(part.content["text"] for part in self.reasoning)
        if self.answers:
            message["tool_call_id"] = self.answers
        if self.name:
            message["name"] = self.name
        return message

    def content(self) -> str | list[dict[str, Any]] | None:
        """A string if there is only text; system and tool messages are always one string, as every template
        reads them.
        """
        if not self.parts:
            return None if self.calls else ""
        if self.role in ("system", "tool"):
            return "\n".join(part.content["text"] for part in self.parts)
        if len(self.parts) == 1 and self.parts[0].kind == "text":
            return self.parts[0].content["text"]
        return [part.content for part in self.parts]

    def where(self, ours: re.Match[str]) -> str:
        """The client's path for a match of _WHERE."""
        _, inside, part, held, call = ours.groups()
        if part is not None and int(part) < len(self.parts):
            found = self.parts[int(part)]
            return found.path if held is None else found.held or found.path + held
        if call is not None and int(call) < len(self.calls):
            return self.calls[int(call)].path
        several = {".content": self.parts, ".reasoning": self.reasoning}.get(inside, [])
        return several[0].held or several[0].path if len(several) == 1 else self.path


class Conversation:
    """All turns, in order."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.root = "messages"  # the client's name of the whole conversation
        self._media_of_results: list[Part] = []  # media of tool results, for the next user message
        self._names: dict[str, str] = {}  # id of a call -> name of its tool

    def system(self, parts: list[Part], path: str, role: str = "system") -> None:
        self._show()
        if parts:
            self.turns.append(Turn(role, path, parts))

    def user(self, parts: list[Part], path: str) -> None:
        media, self._media_of_results = self._media_of_results, []
        self._turn("user", path).append(media + parts)

    def assistant(self, parts: list[Part], path: str, *, reasoning: Part | None = None) -> None:
        self._show()
        turn = self._turn("assistant", path)
        turn.append(parts)
        if reasoning is not None and reasoning.content["text"]:
            turn.reasoning.append(reasoning)

    def call(self, call_id: str, name: str, arguments: dict[str, Any] | str, path: str) -> None:
        """A tool call of the assistant."""
        self._show()
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant", path).calls.append(Part(call, path))

    def result(self, call_id: str, parts: list[Part], path: str) -> None:
        """Add the result of a tool call."""
        texts = [part for part in parts if part.kind == "text"]
        self._media_of_results += [part for part in parts if part.kind != "text"]
        texts = texts or [text_part("", path)]
        self.turns.append(Turn("tool", path, texts, answers=call_id, name=self._names.get(call_id, "")))

    def close(self) -> None:
        """Finish the conversation, after the last turn."""
        self._show()

    def _show(self) -> None:
        if self._media_of_results:
            self.user([], self._media_of_results[0].path)

    def _turn(self, role: str, path: str) -> Turn:
        """The current message of this role, or a new one."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(Turn(role, path, []))
        return self.turns[-1]

    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]

    async def settle(self, renderer: Renderer) -> None:
        """Adapt the turns to the template: system texts inside stay if the template shows them, otherwise they move to
        the first.

        If the template requires alternating roles, an empty assistant message is inserted between a tool's result and a
        user's text. Raises RenderError for a message with too many parts: the renderer gets system and tool messages as
        one text.
        """
        for turn in self.turns:
            if len(turn.parts) > renderer.config.max_parts:
                text = f"{turn.path} has {len(turn.parts)} parts; at most {renderer.config.max_parts}."
                raise invalid(text, turn.path)
        inside = any(turn.role in ("system", "developer") for turn in self.turns[1:])
        if inside and not await shows(renderer, "system inside", _SYSTEM_INSIDE):
            self.hoist()
        behind = any((one.role, other.role) == ("tool", "user") for one, other in pairwise(self.turns))
        if behind and not await shows(renderer, "behind", _BEHIND_TOOL) and await shows(renderer, "parted", _PARTED):
            self.part()

    def hoist(self) -> None:
        """Move all system texts into one leading message."""
        leading = [turn for turn in self.turns if turn.role in ("system", "developer")]
        parts = [part for turn in leading for part in turn.parts]
        rest = [turn for turn in self.turns if turn.role not in ("system", "developer")]
        self.turns = []
        self.system(parts, leading[0].path)
        for turn in rest:
            if self.turns[-1].role == turn.role in ("user", "assistant"):
                last = self.turns[-1]
                last.append(turn.parts)
                last.calls += turn.calls
                last.reasoning += turn.reasoning
            else:
                self.turns.append(turn)

    def part(self) -> None:
        """Insert an empty assistant message between a tool's result and the user's next message."""
        turns: list[Turn] = []
        for turn in self.turns:
            if turn.role == "user" and turns and turns[-1].role == "tool":
                turns.append(Turn("assistant", turn.path, []))
            turns.append(turn)
        self.turns = turns

    def cuts(self) -> Iterator[Conversation]:
        """The conversation, then shorter versions without more and more of its oldest messages. System texts and the
        newest message always remain.
        """
        others = [at for at, turn in enumerate(self.turns) if turn.role not in ("system", "developer")]
        yield self
        count = 1
        while count < len(others):
            while count < len(others) - 1 and self.turns[others[count]].role != "user":
                count += 1  # the remaining conversation begins with a user's message
            dropped = set(others[:count])
            shorter = Conversation()
            shorter.root = self.root
            shorter.turns = [turn for at, turn in enumerate(self.turns) if at not in dropped]
            yield shorter
            count = 2 * count if 2 * count < len(others) else max(count + 1, len(others) - 1)

    @contextmanager
    def client_paths(self) -> Iterator[None]:
        """A context in which errors of rendering and of loading media name the paths of the client's request."""
        try:
            yield
        except (RenderError, MediaError) as error:
            error.message = self.where(error.message)
            if error.param == "messages":
                error.param = self.root
                if error.message.startswith("messages "):
                    error.message = self.root + error.message.removeprefix("messages")
            elif error.param:
                error.param = self.where(error.param)
            raise

    def where(self, text: str) -> str:
        """A text of the renderer, with its paths replaced by the client's."""

        def path(found: re.Match[str]) -> str:
            at = int(found[1])
            return self.turns[at].where(found) if at < len(self.turns) else found[0]

        return _WHERE.sub(path, text)


async def shows(renderer: Renderer, name: str, probe: list[dict[str, Any]]) -> bool:
    """Whether the server's template accepts a conversation and renders the text inside; tried once."""
    tried = _tried.setdefault(renderer, {})
    if name not in tried:
        try:
            prompt = await renderer.chat(probe)
            tried[name] = _MARK in (prompt.text or "")
        except RenderError:
            tried[name] = False
    return tried[name]
