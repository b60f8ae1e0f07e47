"""Calls as tags: a name, then each parameter between its tags.

Owner: loop, a generator per choice. In: a Source after the reasoning, and the types of the parameters from the
request's tools. Out: content and calls to the Sink. A value is text: for a string parameter it is emitted as it
arrives; for other types it is converted when its tag closes. Values are unchanged, except that one newline on either
side is removed.

    <begin> <name prefix>N<suffix> <key prefix>K<suffix> V <end value> ... <end call> <end>     tagged
    <begin> N <key>K</key> <value>V</value> ... <end>                                           keyed
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from server.output.events import Sink
from server.output.source import (
    Emit,
    Reader,
    Source,
    accept,
    drop_cut,
    fits_key,
    ignore,
    name_before,
    peek,
    space,
    until,
)
from server.output.tools.base import Schemas, ToolFormat, calls_in_content, converted, is_text, outside, reject, settle
from server.output.tools.json_text import copy_json, escaped, quoted

MOST_NESTED = 64


def tagged(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read sections with calls, or calls without a section."""
    opens = form.name[0]
    while True:
        markers = (*form.begins, opens, *form.ends, *form.skips)
        marker = yield from until(source, markers, sink.content)
        if not marker:
            return
        if marker in form.begins:
            source.keep(len(marker))
            if (yield from _first(source, form)):
                yield from _section(source, sink, form, schemas)
            else:
                reject(source, sink)
        elif marker == opens:
            source.keep(len(marker))
            yield from _section(source, sink, form, schemas)
        else:
            outside(sink, form, marker)


def _first(source: Source, form: ToolFormat) -> Reader[bool]:
    """Read up to the first call of a section. False: the section begins with something else."""
    while True:
        yield from space(source)
        found = yield from accept(source, form.name[0], *form.skips)
        if not found or found == form.name[0]:
            return bool(found)


def _section(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read calls until the section ends; the first call's opening marker has been read and is buffered."""
    while True:
        name, _ = yield from name_before(source, (form.name[1],))
        if not name:
            reject(source, sink)
            return
        sink.call(_plain(form, name))
        source.release()
        yield from _attributes(source, form, form.name[1])
        if not (yield from _parameters(source, sink, form, schemas, name)):
            return
        while True:
            source.keep()
            yield from space(source)
            found = yield from accept(source, form.name[0], *form.ends, *form.skips)
            if found == form.name[0]:
                break
            settle(source, sink, found)
            if found not in form.skips:
                return


def _parameters(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas, name: str) -> Reader[bool]:
    """Read the arguments of one call and its end. False: the text ended inside."""
    opened = False
    while True:
        char = yield from space(source)
        if not char:
            return False
        if not opened and (yield from accept(source, form.block[0])):
            char = yield from space(source)
        if char == "{" and not opened:  # a JSON object in place of the parameters
            if not (yield from copy_json(source, sink.arguments, "<")):
                return False
            for end in (form.block[1], form.end_call):
                yield from space(source)
                yield from accept(source, end)
            break
        found = yield from accept(source, form.key[0], form.end_call)
        if not found and not source.pending:  # the text ended inside a marker
            return False
        if found != form.key[0]:
            if opened:
                sink.arguments("}")
            break
        key, _ = yield from name_before(source, (form.key[1],), fits_key)
        if not key:
            drop_cut(source)
            return False
        if not (yield from _parameter(source, sink, form, schemas.kinds(name, key), key, opened)):
            return False
        opened = True
    sink.end_call()
    return True


def _parameter(
    source: Source, sink: Sink, form: ToolFormat, kinds: frozenset[str], key: str, opened: bool
) -> Reader[bool]:
    """Read one parameter, its key and value. False: the text ended inside."""
    sink.arguments((", " if opened else "{") + quoted(_plain(form, key)) + ": ")
    if form.tag_end:  # an attribute marks values that are text
        attributes = yield from _attributes(source, form, form.key[1])
        kinds = frozenset(("string",)) if any(sign in attributes for sign in TEXT_SIGNS) else NOT_TEXT
    markers = (form.end_value, form.key[0], form.end_call)
    ended = yield from _value(source, sink, markers, kinds, strip=not form.tag_end)
    if ended and ended != form.end_value:  # the value's own end marker is missing
        source.at -= len(ended)
    return bool(ended)


def _attributes(source: Source, form: ToolFormat, read: str) -> Reader[str]:
    """The attributes of a tag after its name; "" if the tag ended with the name."""
    parts: list[str] = []
    if form.tag_end and not read.endswith(form.tag_end):
        yield from until(source, (form.tag_end,), parts.append)
    return "".join(parts)


def _plain(form: ToolFormat, name: str) -> str:
    """A name without the entities of a quoted attribute."""
    return name.replace("&quot;", '"').replace("&amp;", "&") if form.tag_end else name


def can_name(form: ToolFormat, key: str) -> bool:
    """Whether the reader finds a parameter's name again if the name is written into its tag unchanged."""
    if form.machine is keyed:
        return key == key.strip() and form.key[1] not in key
    source = Source(key + form.key[1], closed=True)
    try:
        next(name_before(source, (form.key[1],), fits_key))
    except StopIteration as end:
        return not source.pending and _plain(form, end.value[0]) == key
    raise AssertionError("a closed source starves nobody")


TEXT_SIGNS = ('string="true"', 'type="string"')
NOT_TEXT = frozenset(("null", "boolean", "integer", "number", "object", "array"))


def _value(
    source: Source, sink: Sink, markers: tuple[str, ...], kinds: frozenset[str], *, strip: bool = True
) -> Reader[str]:
    """Read a value and the marker after it; returns the marker, or "" if the text ended inside."""
    if not is_text(kinds):
        parts: list[str] = []
        ended = yield from until(source, markers, parts.append)
        text = "".join(parts)
        if strip and text.startswith("\n"):
            text = text[1:].removesuffix("\n")
        if ended or not source.cut:
            sink.arguments(converted(text, kinds) if ended else text)
        return ended
    sink.arguments('"')
    held = strip and (yield from peek(source)) == "\n"
    if held:
        source.at += 1
    line_end = [""]

    def emit(text: str) -> None:
        text = line_end[0] + text
        line_end[0] = "\n" if held and text.endswith("\n") else ""
        sink.arguments(escaped(text[:-1] if line_end[0] else text))

    ended = yield from until(source, markers, emit)
    if ended or not source.cut:  # a line's end belongs to the closing marker
        sink.arguments('"' if ended else escaped(line_end[0]))
    return ended


# -- keys and values in separate tags


def keyed(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read GLM's form: the name follows the marker."""
    yield from calls_in_content(source, sink, form, lambda: _keyed_call(source, sink, form, schemas))


def _keyed_call(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[bool]:
    yield from space(source)
    name, after = yield from name_before(source, (*form.name, form.key[0], *form.ends, "\n"))
    if not name:
        return False
    if after == form.key[0] or after in form.ends:
        source.at -= len(after)
    sink.call(name)
    source.release()
    if (yield from _pairs(source, sink, form, schemas, name)):
        sink.end_call()
    return True


def _pairs(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas, name: str) -> Reader[bool]:
    """Read keys and values up to the end of the call. False: the text ended inside."""
    opened = False
    while True:
        if not (yield from space(source)):
            return False
        found = yield from accept(source, form.key[0], *form.name, *form.ends)
        if found and found in form.name:
            continue
        if not found and not source.pending:
            return False
        if found != form.key[0]:
            if opened:
                sink.arguments("}")
            return True
        parts: list[str] = []
        if not (yield from until(source, (form.key[1],), parts.append)):
            if not source.cut:
                sink.arguments((', "' if opened else '{"') + escaped("".join(parts)))
            return False
        key = "".join(parts).strip()
        yield from until(source, (form.quotes[0], *form.ends), ignore)
        sink.arguments((", " if opened else "{") + quoted(key) + ": ")
        opened = True
        if not (yield from _value(source, sink, (form.end_value,), schemas.kinds(name, key), strip=False)):
            return False


# -- nested elements


def nested(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read MiniMax-M3's form: a marker precedes each tag; nested elements are objects and arrays."""
    yield from calls_in_content(source, sink, form, lambda: _nested_calls(source, sink, form, schemas))


def _nested_calls(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[bool]:
    found = yield from accept_behind_space(source, form.name[0])
    while found == form.name[0]:
        name, _ = yield from name_before(source, (form.name[1],))
        if not name:
            return False
        sink.call(name)
        source.release()
        if not (yield from _elements(source, sink, form, schemas, name)):
            return True
        source.keep()
        found = yield from accept_behind_space(source, form.name[0], *form.ends)
        if found != form.name[0]:
            settle(source, sink, found)
            return True
    return False


def accept_behind_space(source: Source, *literals: str) -> Reader[str]:
    yield from space(source)
    return (yield from accept(source, *literals))


def _elements(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas, name: str) -> Reader[bool]:
    """Read the parameters of one call. False: the text ended inside."""
    opened = False
    while True:
        if not (yield from space(source)):
            return False
        found = yield from accept(source, form.end_call, form.key[0] + "<")
        if not found and not source.pending:
            return False
        if found in ("", form.end_call):
            if opened:
                sink.arguments("}")
            sink.end_call()
            return True
        key, _ = yield from name_before(source, (">",))
        if not key:
            drop_cut(source)
            return False
        sink.arguments((", " if opened else "{") + quoted(key) + ": ")
        opened = True
        if not (yield from _element(source, sink.arguments, form, partial(_types, schemas, name, key))):
            return False


def _types(schemas: Schemas, tool: str, key: str, steps: list[str | None]) -> frozenset[str]:
    return schemas.types(tool, (key, *steps))


def _element(
    source: Source, emit: Emit, form: ToolFormat, types: Callable[[list[str | None]], frozenset[str]]
) -> Reader[bool]:
    """Read the inside of an element up to its end: a text, or elements. False: the text ended inside.

    `types`: the types of the element, or of an element inside it; its argument is the path of names, None for an item.
    """
    stack: list[str] = []  # closing brackets of the open elements
    steps: list[str | None] = []  # names of the open elements
    leaf = True  # an element has just been opened, so it may hold only text
    while True:
        parts: list[str] = []
        if not (yield from until(source, (form.key[0],), parts.append)):
            if not source.cut:
                emit("".join(parts))
            return False
        closes = bool((yield from accept(source, "</")))
        if not closes:
            yield from accept(source, "<")
        tag: list[str] = []
        if not (yield from until(source, (">",), tag.append)):
            if not source.cut:
                emit("".join(parts + tag))
            return False
        if closes and leaf:
            emit(converted("".join(parts), types(steps)))
            leaf = False
        elif closes:
            emit(stack.pop())
        else:
            key = "".join(tag)
            if leaf:
                listed = key == "item" and types(steps) != {"object"}
                stack.append("]" if listed else "}")
                emit("[" if listed else "{")
            else:
                emit(", ")
            if stack[-1] == "}":
                emit(quoted(key) + ": ")
            leaf = len(stack) < MOST_NESTED
            steps.append(None if stack[-1] == "]" else key)
        if closes:
            steps[-1:] = []
        if closes and not stack:
            return True
