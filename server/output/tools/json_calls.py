"""Calls as JSON objects: between markers, in a list, after a name, or bare.

Owner: loop, a generator per choice. In: a Source after the reasoning. Out: content and calls to the Sink. The name is
emitted as soon as it is known, arguments as they arrive; arguments that precede the name are buffered until it comes.
Members that do not belong to a call become content after the call.

    content <begin> {"name": N, "arguments": {...}} <end>   calls     (hermes, lists, bare objects)
    content <begin> N <separator> {...} <end>               named     (mistral, deepseek, kimi)
"""

from __future__ import annotations

from server.output.events import Sink
from server.output.source import Emit, Reader, Source, accept, ignore, name_before, space
from server.output.tools.base import Schemas, ToolFormat, calls_in_content, settle, whole
from server.output.tools.json_text import copy_json, copy_string, quoted, read_string, string_of

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "tool_call_id", "call_id", "index")  # other keys of calls


def calls(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read JSON objects, or lists of them, after a marker or bare."""
    yield from calls_in_content(
        source,
        sink,
        form,
        call=lambda: _sequence(source, sink, form, bare=False),
        bare=lambda: _sequence(source, sink, form, bare=True),
    )


def _sequence(source: Source, sink: Sink, form: ToolFormat, bare: bool) -> Reader[bool]:
    """Read consecutive calls. Returns False if the buffered text is no call."""
    first = True
    listed = False
    while True:
        char = yield from space(source)
        if char == "[" and not listed and "[" in (form.bare or "[{"):
            source.at += 1
            listed = True
            char = yield from space(source)
        if char == "{":
            if not (yield from call_object(source, sink, form, bare or form.variant == "sure")):
                return False
            first = False
            source.keep()
            char = yield from space(source)
            if char == "{" and (form.ends or form.separator):  # another call, separated only by white space
                continue
        elif first:
            return False
        if listed and char == ",":
            source.at += 1
            continue
        if listed and char == "]":
            source.at += 1
            listed = False
            source.keep()
            yield from space(source)
        if not (listed or (form.separator and (yield from accept(source, form.separator)))):
            break
        if listed and char != "{":
            break
    if char:
        settle(source, sink, (yield from accept(source, *form.ends, form.end_call)))
    else:  # commas and white space at the end of an answer
        source.release()
    return True


def call_object(source: Source, sink: Sink, form: ToolFormat, bare: bool) -> Reader[bool]:
    """Read an object as a call; a bare object needs arguments. False: it is no call, and no event was emitted."""
    source.at += 1
    name: str | None = None
    emitted = False
    waiting: list[str] = []  # arguments that precede the name
    others: list[str] = []  # members that are not part of a call
    stops = _stops(form.ends)
    while True:
        char = yield from space(source)
        if char == ",":
            source.at += 1
            continue
        if char != '"':
            break
        parts: list[str] = []
        source.at += 1
        if not (yield from copy_string(source, parts.append)):
            cut = "".join(parts)
            if not any(known.startswith(cut) for known in _known(form)):
                others.append(f'"{cut}')
            char = ""
            break
        key = string_of(parts)
        if (char := (yield from space(source))) != ":":
            others += [quoted(key)] if char or key not in _known(form) else []
            break
        source.at += 1
        char = yield from space(source)
        if form.variant == "keyed" and not emitted:
            name, key = key, "arguments"
        if key in form.names and char == '"' and name is None:
            name = yield from read_string(source)
            if name is None:
                break
            if not bare or waiting:
                emitted = _emit(source, sink, name, waiting)
        elif key in ARGUMENTS:
            if name is not None and not emitted:
                emitted = _emit(source, sink, name, waiting)
            taken = sink.begun if emitted else bool(waiting)
            if taken:
                yield from _other(source, others, key, stops)
            else:
                yield from _arguments(source, sink.arguments if emitted else waiting.append, stops)
        elif bare and not emitted and key not in OTHER_KEYS:
            break
        elif key in OTHER_KEYS:
            yield from copy_json(source, ignore, stops)
        else:
            yield from _other(source, others, key, stops)
    if char == "}":
        source.at += 1
        if not emitted and name is not None and (not bare or waiting):
            emitted = _emit(source, sink, name, waiting)
    if emitted and char:
        sink.end_call()
    if emitted:
        sink.content(", ".join(others))
    return emitted


def _known(form: ToolFormat) -> tuple[str, ...]:
    """The keys of calls."""
    return (*form.names, *ARGUMENTS, *OTHER_KEYS)


def _other(source: Source, others: list[str], key: str, stops: str) -> Reader[None]:
    """Read a member that is not part of a call."""
    parts = [f"{quoted(key)}: "]
    yield from copy_json(source, parts.append, stops)
    others.append("".join(parts))


def _emit(source: Source, sink: Sink, name: str, waiting: list[str]) -> bool:
    sink.call(name)
    source.release()
    if waiting:
        sink.arguments("".join(waiting))
    return True


def _arguments(source: Source, emit: Emit, stops: str) -> Reader[None]:
    """Read the value of `arguments`: an object; a string that contains one is unwrapped; null becomes an empty
    object.
    """
    char = yield from space(source)
    if char == '"':
        text = yield from read_string(source)
        if text is not None:
            inside = whole(copy_json, text) if text.lstrip().startswith("{") else None
            emit(inside or quoted(text) if text.strip() else "{}")
    elif char == "n":
        parts: list[str] = []
        yield from copy_json(source, parts.append, stops)
        found = "".join(parts)
        if found == "null" or not source.cut:
            emit("{}" if found == "null" else found)
    else:
        yield from copy_json(source, emit, stops)


def _stops(ends: tuple[str, ...]) -> str:
    """First characters of end markers, without characters of JSON's syntax."""
    return "".join({end[0] for end in ends if end} - set('{}[],:"'))


# -- a name before the arguments


def named(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read calls as a marker, a name, a separator and the arguments."""
    read = _list_or_named if form.variant == "mistral" else _named_call
    yield from calls_in_content(source, sink, form, lambda: read(source, sink, form))


def _list_or_named(source: Source, sink: Sink, form: ToolFormat) -> Reader[bool]:
    """Read either of Mistral's two forms after one marker."""
    char = yield from space(source)
    if char in ("[", "{"):
        return (yield from _sequence(source, sink, form, bare=False))
    return (yield from _named_call(source, sink, form))


def _named_call(source: Source, sink: Sink, form: ToolFormat) -> Reader[bool]:
    separators = (*form.name[1:], *form.key, "{") if form.variant == "mistral" else form.name[1:]
    name, marker = yield from name_before(source, tuple(mark for mark in separators if mark))
    if form.variant == "fenced":  # the text before the separator is the kind of tool
        name, marker = yield from name_before(source, ("\n", "```", "{"))
    if not marker:
        return False
    if marker == "{":
        source.at -= 1
    elif form.variant == "mistral" and marker == form.key[0]:  # [CALL_ID]
        _, marker = yield from name_before(source, (form.name[1],))
        if not marker and source.cut:
            source.at = len(source.text)
    if form.variant == "kimi":
        named, _, number = name.removeprefix("functions.").rpartition(":")
        name = named if named and number.isdigit() else name
    sink.call(name)
    source.release()
    if form.variant == "fenced":
        yield from accept(source, "```json", "json")
    char = yield from space(source)
    ended = True
    if char == "{":
        ended = yield from copy_json(source, sink.arguments, _stops(form.ends))
    if ended and char:
        yield from _end_call(source, sink, form)
    return True


def _end_call(source: Source, sink: Sink, form: ToolFormat) -> Reader[None]:
    sink.end_call()
    source.keep()
    yield from space(source)
    if form.variant == "fenced" and (yield from accept(source, "```")):
        source.keep()
        yield from space(source)
    settle(source, sink, (yield from accept(source, *form.ends)))
