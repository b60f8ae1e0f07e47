"""Shapes: the grammar of each call format, so that a forced call is written as the format's own parser reads it.

Owner: none, pure functions; called in the pool. In: a format, the ids of its marker tokens, and for each tool its name
and the schema of its arguments as the grammar's `%json` takes it. Out: Lark. Markers that are tokens are written as
ids, so that no other spelling of them counts as a call; white space between calls is optional.

    start: PREFIX? before call (between call)* after          a call is required
    start: (TEXT section)* TEXT                             optional calls in free text, after a marker token
    start: (open section)* REST                             the same if the marker is text, with which `open` ends
    start: FIRST (section TEXT)* | NL bare                  calls may start the answer without a marker; other text
                                                            must not begin as a call does
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from server.errors import quoted
from server.output.source import fits_tool
from server.output.tools import json_calls, python_calls, tag_calls
from server.output.tools.base import ToolFormat
from server.structure.call_notations import Braces, Elements, Json, Tagged
from server.structure.call_values import Tool, before_token, in_order, joined, literal, plain, spelled, without
from server.structure.schema_faults import wrong

NL = r"NL: /[ \n]{0,2}/"


@dataclass(frozen=True, slots=True)
class Calls:
    """The parts of a section of calls, as Lark, and the rules they use."""

    before: str
    calls: list[str]  # one alternative per tool
    between: str
    after: str
    rules: list[str]


def grammar_of(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool], *, must: bool, most: int) -> str | None:
    """The Lark for calls of these tools; None if the format has no shape. `most`: 1, or 0 for any number of calls."""
    make = SHAPES.get(form.machine)
    if make is None or not tools:
        return None
    tools = _nameable(form, tools)
    shape = make(form, ids, tools)
    several = "" if most == 1 else f"({joined(shape.between, 'call')})*"
    section = joined(shape.before, "call", several, shape.after)
    rules = ["call: " + " | ".join(f"({call})" for call in shape.calls), NL, *shape.rules]
    if must:
        return "\n".join([f"start: NL {section}", *rules])
    trigger = next((marker for marker in (*form.begins, form.name[0]) if marker in ids), None)
    opening = f"<[{ids[trigger]}]>" if trigger else ""
    if not trigger and not form.bare:
        return _behind_part(form, ids, shape, section, rules, most) or _behind_text(form, shape, section, rules, most)
    if trigger and not (section.startswith(opening) or all(call.startswith(opening) for call in shape.calls)):
        if not form.bare:
            return None
        section = joined(opening, "NL", section)
    first, bare = "TEXT", ""
    if form.bare:
        alone = make(replace(form, begins=(), ends=()), ids, tools)
        first, bare = "FIRST", f" | NL {joined(alone.before, 'call', several, alone.after)}"
        rules.append(f"FIRST: TEXT & /[ \\t\\r\\n]*([^ \\t\\r\\n{plain(form.bare)}](?s:.*))?/")
    if trigger:
        behind = "TEXT"
        if form.separator:  # after it, or after white space alone, the parser would read another call
            behind = "BEHIND"
            rules.append(f"BEHIND: TEXT & ~/[ \\t\\r\\n]*[{plain(form.separator + form.bare)}](?s:.*)/")
        first += f" (section {behind})" + ("?" if most == 1 else "*")
        rules.append(f"section: {section}")
    return "\n".join([f"start: {first}{bare}", f"TEXT: {_no_opening(form, trigger)}", *rules])


def _nameable(form: ToolFormat, tools: Sequence[Tool]) -> list[Tool]:
    """The tools whose names the format's parser can read; the others are left out, or refused if strict."""
    can_name: Callable[[str], bool] = python_calls.can_name if form.machine is python_calls.code else fits_tool
    named = [tool for tool in tools if form.machine is json_calls.calls or can_name(tool.name)]
    for tool in tools:
        if tool not in named:
            tool.leave("name", tool.path)
    if not named:
        raise wrong(tools[0].path, f"a call of {quoted(tools[0].name)} cannot be written in this model's form of calls")
    return named


def wake_of(form: ToolFormat, ids: Mapping[str, int]) -> int | None:
    """The token that begins every section of calls; a grammar of free text may sleep until it comes. None if a section
    may begin in other ways too."""
    openings = _openings(form)
    return ids.get(openings[0]) if len(openings) == 1 and not form.bare and not form.skips else None


def _openings(form: ToolFormat) -> list[str]:
    """The markers after which the parser reads a call."""
    alone = form.name[:1] if form.machine is tag_calls.tagged else ()
    return [mark for mark in dict.fromkeys((*form.begins, *alone)) if mark]


def _no_opening(form: ToolFormat, trigger: str | None) -> str:
    """An expression for text in which no call begins, neither after a text marker nor without a marker."""
    marks = dict.fromkeys((*((trigger,) if trigger else ()), *_openings(form)))
    return " & ".join(["/(?s:.*)/", *(f"~/(?s:.*){plain(mark)}(?s:.*)/" for mark in marks)])


def _behind_part(
    form: ToolFormat, ids: Mapping[str, int], shape: Calls, section: str, rules: list[str], most: int
) -> str | None:
    """Calls in free text after a marker with a token. None if it has none, or may begin anything else."""
    letters, rest = before_token(form.begins[0], ids) if len(form.begins) == 1 else ("", "")
    if not rest or form.skips:
        return None
    head, alone = joined(literal(letters), spelled(rest, ids)), spelled(rest, ids)
    if section.startswith(head):
        section = joined(alone, section.removeprefix(head))
    elif not shape.before and not shape.after and all(call.startswith(head) for call in shape.calls):
        section = "call"
        rules = [
            "call: " + " | ".join(f"({joined(alone, call.removeprefix(head))})" for call in shape.calls),
            *rules[1:],
        ]
    else:
        return None
    text = f"TEXT: {_no_opening(form, None)}\nOPEN: TEXT & /(?s:.*){plain(letters)}/"  # TEXT ends before a token
    return "\n".join([f"start: (OPEN section){'?' if most == 1 else '*'} TEXT", text, f"section: {section}", *rules])


def _behind_text(form: ToolFormat, shape: Calls, section: str, rules: list[str], most: int) -> str | None:
    """Calls in free text after a text marker. None if a call may begin without it."""
    if len(form.begins) != 1 or form.bare or form.name[0]:
        return None
    mark = literal(form.begins[0])
    if not section.startswith(mark):
        if shape.before or shape.after or not all(call.startswith(mark) for call in shape.calls):
            return None
        section = "call"
        rules = ["call: " + " | ".join(f"({call.removeprefix(mark)})" for call in shape.calls), *rules[1:]]
    start = f"start: (open section){'?' if most == 1 else '*'} REST"
    texts = [f"open[lazy]: TEXT {mark}", "TEXT: /(?s:.*)/", f"REST: {without(form.begins[0])}"]
    return "\n".join([start, *texts, f"section: {section.removeprefix(mark)}", *rules])


# -- JSON


def _object(form: ToolFormat, at: int, tool: Tool) -> tuple[str, str]:
    """(Lark of a call as a JSON object, rule of its arguments)"""
    rule = f"args_{at}: %json {tool.text(tool.parameters, tool.path)}"
    name = json.dumps(tool.name, ensure_ascii=False)
    if form.variant == "keyed":
        return joined(literal("{" + name + ": "), f"args_{at}", literal("}")), rule
    key = "parameters" if form.bare == "{" or form.names[0] != "name" else "arguments"
    head = f'{{"{form.names[0]}": {name}, "{key}": '
    return joined(literal(head), f"args_{at}", literal("}")), rule


def _json_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    made = [_object(form, at, tool) for at, tool in enumerate(tools)]
    objects, rules = [call for call, _ in made], [rule for _, rule in made]
    begins = [marker for marker in form.begins if marker in ids] or [*form.begins, ""]
    begin, end = spelled(begins[0], ids), spelled(form.ends[0], ids) if form.ends else ""
    if form.bare == "{":
        return Calls("", objects, literal("; "), "", rules)
    if form.variant in ("list", "keyed", "sure"):
        opening = "" if form.bare == "[" else begin
        return Calls(joined(opening, '"["'), objects, literal(", "), joined('"]"', "" if form.bare else end), rules)
    return Calls("", [joined(begin, "NL", one, "NL", end) for one in objects], "NL", "", rules)


def _named_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    begin, separator = spelled(form.begins[0], ids), spelled(form.name[1], ids)
    end = spelled(form.ends[0], ids) if form.ends else ""
    rules = [f"args_{at}: %json {tool.text(tool.parameters, tool.path)}" for at, tool in enumerate(tools)]
    if form.variant == "mistral" and form.name[1] not in ids:  # tokenizers before version 11
        objects = [_object(form, at, tool)[0] for at, tool in enumerate(tools)]
        return Calls(joined(begin, '" "?', '"["'), objects, literal(", "), '"]"', rules)
    calls = []
    for at, tool in enumerate(tools):
        name, arguments = literal(tool.name), f"args_{at}"
        if form.variant == "fenced":
            fenced = joined(separator, name, literal("\n```json\n"), arguments, literal("\n```"))
            calls.append(joined(begin, literal("function"), fenced, end))
        elif form.variant == "kimi":
            named = joined(literal(f"functions.{tool.name}:"), "NUMBER", separator)
            calls.append(joined(begin, named, arguments, end))
        else:
            calls.append(joined(begin, name, separator, arguments, end))
    if form.variant == "kimi":
        rules.append("NUMBER: /[0-9]{1,4}/")
    before, after = (spelled(mark, ids) for mark in form.skips) if form.skips else ("", "")
    return Calls(before, calls, "NL" if form.variant == "fenced" else "", after, rules)


# -- tags


def _tagged_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    rules: list[str] = []
    calls = []
    begin, end = spelled(form.begins[0], ids), spelled(form.ends[0], ids)
    for at, tool in enumerate(tools):
        parameters = [
            _maybe(needed, joined(spelled(_opened(form, name, kinds), ids), value, "NL"))
            for name, needed, kinds, value in _values(form, ids, tool, at, rules)
        ]
        opened = spelled(form.name[0] + tool.name + _closed(form.name[1], form.tag_end, ""), ids)
        calls.append(joined(opened, "NL", *parameters, spelled(form.end_call, ids)))
    if len(form.skips) == 2 and form.end_call not in form.skips and form.name[0].startswith("<steptml"):
        skips = [spelled(mark, ids) for mark in form.skips]
        return Calls(begin, [joined(skips[0], call, skips[1]) for call in calls], "NL", end, rules)
    if form.name[0] == "<function=":  # every call has its own markers
        return Calls("", [joined(begin, "NL", call, "NL", end) for call in calls], "NL", "", rules)
    return Calls(joined(begin, "NL"), calls, "NL", joined("NL", end), rules)


def _opened(form: ToolFormat, name: str, kinds: frozenset[str]) -> str:
    """The opening tag of a parameter."""
    if not form.tag_end:
        return form.key[0] + name + form.key[1]
    kind = "string" if kinds == {"string"} else "object"
    sign = f' type="{kind}"' if form.tag_end != ">" else f' string="{str(kind == "string").lower()}"'
    return form.key[0] + name + _closed(form.key[1], form.tag_end, sign)


def _closed(suffix: str, tag_end: str, sign: str) -> str:
    return suffix if not tag_end or suffix.endswith(tag_end) else suffix + sign + tag_end


def _keyed_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    rules: list[str] = []
    calls = []
    begin, end = spelled(form.begins[0], ids), spelled(form.ends[0], ids)
    for at, tool in enumerate(tools):
        key, opening = form.key, spelled(form.quotes[0], ids)
        parameters = [
            _maybe(needed, joined(spelled(key[0] + name + key[1], ids), "NL", opening, value, "NL"))
            for name, needed, _, value in _values(form, ids, tool, at, rules)
        ]
        named = joined(literal(tool.name), spelled(form.name[0], ids), "NL")
        calls.append(joined(begin, named, *parameters, end))
    before, after = (spelled(mark, ids) for mark in form.skips) if form.skips else ("", "")
    return Calls(joined(before, "NL" if before else ""), calls, "NL", joined("NL" if after else "", after), rules)


def _values(
    form: ToolFormat, ids: Mapping[str, int], tool: Tool, at: int, rules: list[str]
) -> list[tuple[str, bool, frozenset[str], str]]:
    """(name, whether it is required, types, Lark of the value and its end) of each parameter; appends to `rules`."""
    line = "" if form.tag_end or form.machine is tag_calls.keyed else "\n"
    values = Tagged(
        tool, at, ids, partial(tag_calls.can_name, form), line=line, end=form.end_value, signed=bool(form.tag_end)
    )
    found = [
        (name, needed, values.kinds(schema), values.parameter(schema, f"{tool.path}.properties.{name}"))
        for name, needed, schema in values.members(values.arguments(), tool.path)
    ]
    rules += values.rules
    return found


def _maybe(needed: bool, text: str) -> str:
    return text if needed else f"({text})?"


def _nested_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    rules: list[str] = []
    calls = []
    begin, end = spelled(form.begins[0], ids), spelled(form.ends[0], ids)
    for at, tool in enumerate(tools):
        values = Elements(tool, at, ids, form.key[0])
        opened = spelled(form.name[0] + tool.name + form.name[1], ids)
        calls.append(joined(opened, values.parameters(), spelled(form.end_call, ids)))
        rules += values.rules
    return Calls(joined(begin, "NL"), calls, "NL", joined("NL", end), rules)


# -- code


def _code_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    """Arguments by name, with JSON's literals, which the parser accepts like Python's."""
    rules: list[str] = []
    calls = []
    for at, tool in enumerate(tools):
        values = Json(tool, at, ids, python_calls.can_name)
        pairs = [
            (needed, joined(literal(f"{name}="), values.json(schema)))
            for name, needed, schema in values.members(values.arguments(), tool.path)
        ]
        start, more = in_order(pairs, ", ", f"pairs_{at}")
        calls.append(joined(literal(f"{tool.name}("), start, literal(")")))
        rules += [*values.rules, *more]
    begin = spelled(form.begins[0], ids) if form.begins else ""
    end = spelled(form.ends[0], ids) if form.ends else ""
    if form.begins and form.begins[0] == "<function_calls>":
        return Calls(begin, calls, literal("\n"), end, rules)
    return Calls(joined(begin, '"["'), calls, literal(", "), joined('"]"', end), rules)


def _brace_calls(form: ToolFormat, ids: Mapping[str, int], tools: Sequence[Tool]) -> Calls:
    rules: list[str] = []
    calls = []
    begin, end = spelled(form.begins[0], ids), spelled(form.ends[0], ids)
    for at, tool in enumerate(tools):
        values = Braces(tool, at, ids, form.quotes[0])
        calls.append(joined(begin, literal(form.name[0] + tool.name), values.arguments_object(), end))
        rules += values.rules
    return Calls("", calls, "", "", rules)


SHAPES: dict[Any, Callable[[ToolFormat, Mapping[str, int], Sequence[Tool]], Calls]] = {
    json_calls.calls: _json_calls,
    json_calls.named: _named_calls,
    tag_calls.tagged: _tagged_calls,
    tag_calls.keyed: _keyed_calls,
    tag_calls.nested: _nested_calls,
    python_calls.code: _code_calls,
    python_calls.braces: _brace_calls,
}
