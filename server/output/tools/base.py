"""ToolFormat: how one model family writes calls, as data for a machine that reads it.

Owner: none, frozen values. In: the markers of PARSERS.md section 2. Out: a generator over a Source that passes content
and calls to a Sink. Three machines read nearly all formats: json_calls, tag_calls, python_calls. Text that begins like
a call but is none becomes content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import orjson

from server.output.events import Sink
from server.output.source import Reader, Source, space, until
from server.output.tools.json_text import copy_json, copy_literal, number, quoted

Machine = Callable[[Source, Sink, "ToolFormat", "Schemas"], Reader[None]]
ReadCall = Callable[[], Reader[bool]]  # False: the buffered text is no call, and no event was emitted
Dataclass = TypeVar("Dataclass")

UNKNOWN = frozenset({"unknown"})
KINDS = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
NULLS = ("null", "none", "nil")  # spellings of null where nothing else is allowed
MOST_SCHEMAS = 200  # schemas examined for the types of one parameter
INTEGER = re.compile(r"-?(0|[1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Markers of one format; each machine uses some of the fields."""

    machine: Machine
    begins: tuple[str, ...] = ()  # begin a call or a section of calls
    ends: tuple[str, ...] = ()  # end a call or a section of calls
    skips: tuple[str, ...] = ()  # ignored markers, inside and outside of sections
    name: tuple[str, str] = ("", "")  # around a call's name
    end_call: str = ""
    key: tuple[str, str] = ("", "")  # around a parameter's name
    end_value: str = ""
    tag_end: str = ""  # ends tags that have attributes
    block: tuple[str, str] = ("", "")  # around a JSON object in place of the parameters
    quotes: tuple[str, ...] = ('"', "'")  # around strings in Python literals
    bare: str = ""  # first characters of a call without a marker, at the start of the answer
    names: tuple[str, ...] = ("name",)  # keys of the name in a JSON call
    separator: str = ""  # between two calls
    variant: str = ""  # selects a variant of the machine
    ids: Literal["hex", "mistral", "kimi"] = "hex"

    @property
    def marks(self) -> tuple[str, ...]:
        """The markers around calls, names and values."""
        inside = (*self.name, self.end_call, *self.key, *self.quotes, self.end_value, self.tag_end, *self.block)
        fence = ("```json",) if self.variant == "fenced" else ()
        return (*self.begins, *self.ends, *self.skips, *inside, *fence)


def spelled(value: Dataclass, markers: Mapping[str, str]) -> Dataclass:
    """A copy of the format in which each marker is replaced, in all fields."""

    def text(given: str) -> str:
        for marker in sorted(markers, key=len, reverse=True):
            given = given.replace(marker, markers[marker])
        return given

    changed: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        given = getattr(value, field.name)
        if isinstance(given, str):
            changed[field.name] = text(given)
        elif isinstance(given, tuple) and all(isinstance(item, str) for item in given):
            changed[field.name] = tuple(text(item) for item in given)
    return replace(value, **changed)  # type: ignore[type-var]


def texts_of(value: Any) -> Iterable[str]:
    """Every text in the fields of a format."""
    for field in fields(value):
        given = getattr(value, field.name)
        if isinstance(given, str):
            yield given
        elif isinstance(given, tuple):
            yield from (item for item in given if isinstance(item, str))


def calls_in_content(
    source: Source, sink: Sink, form: ToolFormat, call: ReadCall, bare: ReadCall | None = None
) -> Reader[None]:
    """Read content, with `call` after each opening marker; `bare` reads a call without a marker at the
    answer's start.
    """
    if form.bare and bare is not None:
        source.keep()
        char = yield from space(source)
        if not (char and char in form.bare and (yield from bare())):
            reject(source, sink)
    markers = form.begins + form.ends + form.skips
    while marker := (yield from until(source, markers, sink.content)):
        if marker not in form.begins:
            outside(sink, form, marker)
            continue
        source.keep(len(marker))
        if not (yield from call()):
            reject(source, sink)


def reject(source: Source, sink: Sink) -> None:
    """The buffered text is no call, and so content; nothing if a length limit cut the answer before it could be one."""
    text = source.take_buffered()
    if source.cut:
        source.at = len(source.text)
    else:
        sink.reject(text)


def settle(source: Source, sink: Sink, marker: str) -> None:
    """After a call: drop the buffered white space if a marker follows; otherwise it becomes content."""
    if marker:
        source.release()
    else:
        sink.content(source.take_buffered())


def outside(sink: Sink, form: ToolFormat, marker: str) -> None:
    """Handle a marker in content that begins no call."""
    if marker in form.ends:
        sink.stray(marker)
    else:
        sink.drop_space()


# -- types of parameters


class Schemas:
    """The parameters' schemas of the request's tools."""

    __slots__ = ("_tools",)

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None = ()) -> None:
        self._tools: dict[str, Any] = {}
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._tools[function["name"]] = function.get("parameters")

    def kinds(self, tool: str, key: str) -> frozenset[str]:
        """Types that a parameter may have."""
        return self.types(tool, (key,))

    def types(self, tool: str, steps: Iterable[str | None]) -> frozenset[str]:
        """Types of a value inside the arguments. Each step is a property's name, or None for an item of an array."""
        root = self._tools.get(tool)
        found = root
        for step in steps:
            found = inside(found, root, step)
        return kinds_of(found, root)


def inside(schema: Any, root: Any, step: str | None, seen: set[int] | None = None) -> Any:
    """The schema of a property or, if `step` is None, of an array's items; None if there is no schema.

    `seen`: schemas already searched without a result, so that a target of several branches is searched once.
    """
    schema, seen = referred(schema, root), set() if seen is None else seen
    if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > MOST_SCHEMAS:
        return None
    seen.add(id(schema))
    named = schema.get("properties")
    found = schema.get("items") if step is None else named.get(step) if isinstance(named, Mapping) else None
    rest = schema.get("additionalProperties")
    if found is None and step is not None and isinstance(rest, Mapping):
        found = rest
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        for branch in branches[:64] if found is None and isinstance(branches, list) else ():
            found = found or inside(branch, root, step, seen)
    return found


def referred(schema: Any, root: Any) -> Any:
    """The schema that a $ref points to, None if there is none; a schema without $ref is returned as it is."""
    for _ in range(16):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        found = root if reference.startswith("#") else None
        for step in filter(None, reference[1:].split("/")):
            found = found.get(step) if isinstance(found, Mapping) else None
        schema = found
    return None


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Types of a schema; UNKNOWN if it names none."""
    return _kinds(schema, root, {}) or UNKNOWN


def _kinds(schema: Any, root: Any, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """`known`: types by schema; empty while a schema is being read, since a branch that refers back to its own union
    adds no types."""
    if not isinstance(schema, Mapping) or len(known) > MOST_SCHEMAS:
        return UNKNOWN
    at = id(schema)
    if at not in known:
        known[at] = frozenset()
        known[at] = _kinds_said(schema, root, known)
    return known[at]


def _kinds_said(schema: Mapping[str, Any], root: Any, known: dict[int, frozenset[str]]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str) or (isinstance(kind, list) and kind):
        listed = [kind] if isinstance(kind, str) else [item for item in kind if isinstance(item, str)]
        return frozenset(listed) & KINDS or UNKNOWN
    if "$ref" in schema:
        return _kinds(referred(schema, root), root, known)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(KIND_OF.get(type(value), "object") for value in values)
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list) and branches:
            return frozenset().union(*(_kinds(branch, root, known) for branch in branches[:64]))
    parts = schema.get("allOf")
    for part in parts[:64] if isinstance(parts, list) else ():
        if (found := _kinds(part, root, known)) and found != UNKNOWN:
            return found
    return UNKNOWN


KIND_OF: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
                            list: "array", dict: "object"}  # fmt: skip


def is_text(kinds: frozenset[str]) -> bool:
    """Whether a value is always a string, so that it may be sent before it ends."""
    return kinds == {"string"}


def converted(text: str, kinds: frozenset[str]) -> str:
    """A parameter's text as JSON of one of its types; as a string if it fits none."""
    if is_text(kinds):
        return quoted(text)
    word = text.strip()
    if "unknown" in kinds:
        return quoted(text) if word[:1] == '"' else as_json(word) or quoted(text)
    if "null" in kinds and (word in ("null", "None") or (kinds == {"null"} and word.lower() in NULLS)):
        return "null"
    if "boolean" in kinds and word in ("true", "false", "True", "False"):
        return word.lower()
    if "integer" in kinds and INTEGER.match(word):
        return word
    if "number" in kinds and (found := number(word)):
        return found
    if word[:1] == '"' and "string" not in kinds:
        return as_json(word) or quoted(text)
    if word[:1] in ("{", "[", "(") and ("object" if word[0] == "{" else "array") in kinds:
        return as_json(word) or as_json(whole(copy_literal, word) or "") or quoted(text)
    return quoted(text)


def as_json(word: str) -> str:
    """A text that is JSON, with our separators; "" if it is not JSON."""
    try:
        orjson.loads(word)
    except orjson.JSONDecodeError:
        return ""
    return whole(copy_json, word) or ""


def whole(copy: Callable[..., Reader[bool]], text: str) -> str | None:
    """The output of a copying reader for a complete text; None if the text does not end with the value."""
    source, parts = Source(text, closed=True), list[str]()
    try:
        next(copy(source, parts.append))
    except StopIteration as end:
        return "".join(parts) if end.value and not source.text[source.at :].strip() else None
    raise AssertionError("a closed source starves nobody")
