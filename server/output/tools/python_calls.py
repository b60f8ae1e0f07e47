"""Calls as code: NAME(key=value, ...), in a list or between markers; and Gemma's call:NAME{key:value}.

Owner: loop, a generator per choice. In: a Source after the reasoning. Out: content and calls to the Sink. Values are
Python literals, copied as JSON while they arrive. A bracket in prose becomes a call only if a name, an open bracket and
a key follow it.
"""

from __future__ import annotations

from server.output.events import Sink
from server.output.source import Reader, Source, accept, drop_cut, name_before, space
from server.output.tools.base import Schemas, ToolFormat, calls_in_content, settle
from server.output.tools.json_calls import call_object
from server.output.tools.json_text import copy_literal, quoted

MARKS = frozenset("_.-")


def can_name(name: str) -> bool:
    """Whether a call or an argument may have this name: letters and digits of any script, and a few marks."""
    return bool(name) and all(char.isalnum() or char in MARKS for char in name)


def code(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read calls between markers, or bare at the start of the answer."""

    def read() -> Reader[bool]:
        return _calls(source, sink, form)

    yield from calls_in_content(source, sink, form, read, bare=read)


def _calls(source: Source, sink: Sink, form: ToolFormat) -> Reader[bool]:
    """Read calls, with or without brackets around the list. Returns False if the buffered text is no call."""
    char = yield from space(source)
    listed = char == "["
    if listed:
        source.at += 1
        char = yield from space(source)
    emitted = 0
    while char:
        if char == "{" and form.begins:
            one = yield from call_object(source, sink, form, bare=False)
        else:
            one = yield from _call(source, sink)
        if not one:
            break
        emitted += 1
        source.keep()
        char = yield from space(source)
        if char == "]" and listed:
            source.at += 1
            source.keep()
            yield from space(source)
            break
        if char == ",":
            source.at += 1
            char = yield from space(source)
        if not can_name(char) and char != "{":
            break
    if source.cut:
        source.at = len(source.text)
    elif emitted and char:
        settle(source, sink, (yield from accept(source, *form.ends)))
    elif emitted:  # a comma and white space at the end of an answer
        source.release()
    return bool(emitted)


def _call(source: Source, sink: Sink) -> Reader[bool]:
    """Read NAME(key=value, ...). Returns False if it is no call and no event was emitted."""
    name, _ = yield from name_before(source, ("(",))
    if not can_name(name):
        return False
    char = yield from space(source)
    key = ""
    if char != ")":
        key, _ = yield from name_before(source, ("=",))
        if not can_name(key):
            return False
    sink.call(name)
    source.release()
    opened = False
    while key:
        sink.arguments((", " if opened else "{") + quoted(key) + ": ")
        opened = True
        if not (yield from copy_literal(source, sink.arguments)):
            return True
        if (yield from space(source)) == ",":
            source.at += 1
            yield from space(source)
        char = yield from space(source)
        if char == ")":
            break
        key, _ = yield from name_before(source, ("=",))
    if char != ")":
        drop_cut(source)
        return True
    source.at += 1
    if opened:
        sink.arguments("}")
    sink.end_call()
    return True


def braces(source: Source, sink: Sink, form: ToolFormat, schemas: Schemas) -> Reader[None]:
    """Read a marker, call:NAME, and an object whose strings are between markers."""
    yield from calls_in_content(source, sink, form, lambda: _brace_call(source, sink, form))


def _brace_call(source: Source, sink: Sink, form: ToolFormat) -> Reader[bool]:
    yield from space(source)
    yield from accept(source, form.name[0])
    name, _ = yield from name_before(source, (form.name[1],))
    if not name:
        return False
    source.at -= len(form.name[1])
    sink.call(name)
    source.release()
    if (yield from copy_literal(source, sink.arguments, form.quotes)):
        sink.end_call()
    return True
