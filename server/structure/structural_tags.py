"""Structural tags: free text in which tags open constrained parts, in both of vLLM's forms, as Lark.

Owner: none; called in the pool. In: `structures` and `triggers` (the older form), or a `format` made of parts
(xgrammar's). Out: a GrammarSpec. Text inside a tag ends where the tag's end is first spelled; free text elsewhere
extends to the end of the answer, so nothing can follow it.

    {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", ..}, "end": "</a>"}    begin  %json  end
    {"type": "triggered_tags", "triggers": ["<a"], "tags": [..]}                              (TEXT tag)* REST
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.base.grammar import GrammarSpec
from server.errors import quoted
from server.flags.config import LimitsConfig
from server.structure.call_values import literal, plain
from server.structure.patterns import check_pattern, expression
from server.structure.schema_faults import measure, too_complex, wrong

SchemaText = Callable[[Any, str], str]
ANY = "/(?s:.*)/"
PARTS = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"


def structural_tag_spec(value: Any, param: str, schema_text: SchemaText, limits: LimitsConfig) -> GrammarSpec:
    """`schema_text` makes the text for %json from a schema. Raises ApiError with the path of the faulty part."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise wrong(param, "is not JSON") from None
    writer = Writer(schema_text, limits)
    if isinstance(value, dict) and value.get("format") is not None:
        measure(value["format"], f"{param}.format", limits)
        start = writer.part(value["format"], f"{param}.format")
        return GrammarSpec("lark", "\n".join([f"start: {start}", *writer.rules]))
    tags, triggers = (value.get(name) if isinstance(value, dict) else None for name in ("structures", "triggers"))
    if not isinstance(tags, list) or not tags or not isinstance(triggers, list) or not triggers:
        raise wrong(param, "needs `format`, or `structures` (begin, schema, end) and `triggers`, both lists")
    parts = [
        {**tag, "content": {"type": "json_schema", "json_schema": tag.get("schema", True)}}
        if isinstance(tag, dict)
        else tag
        for tag in tags
    ]
    start = writer.triggered(parts, triggers, param, ".structures", "*", rest=True)
    return GrammarSpec("lark", "\n".join([f"start: {start}", *writer.rules]))


class Writer:
    """Builds the rules of one structural tag."""

    def __init__(self, schema_text: SchemaText, limits: LimitsConfig) -> None:
        self.rules: list[str] = []
        self._schema_text, self._limits = schema_text, limits
        self._count = 0

    def part(self, form: Any, path: str, *, last: bool = True) -> str:
        """The Lark of a part. `last`: nothing follows it, so it may be free text."""
        kind = form.get("type") if isinstance(form, dict) else None
        match kind:
            case "const_string":
                return literal(self._text(form, "value", path))
            case "json_schema":
                rule = self._name("json")
                schema = form.get("json_schema", True)
                self.rules.append(f"{rule}: %json {self._schema_text(schema, f'{path}.json_schema')}")
                return rule
            case "regex":
                pattern = self._text(form, "pattern", path)
                if why := check_pattern(pattern, self._limits):
                    raise (too_complex if "at most" in why else wrong)(f"{path}.pattern", why)
                return expression(pattern)
            case "any_text" if last:
                return ANY
            case "sequence" | "or":
                return self._several(form, kind, path, last)
            case "tag":
                return self._tag(form, path)
            case "triggered_tags" if last:
                star = "?" if form.get("stop_after_first") else "*"
                if form.get("at_least_one"):
                    star = "" if form.get("stop_after_first") else "+"
                rest = not form.get("stop_after_first")
                return self.triggered(form.get("tags"), form.get("triggers"), path, ".tags", star, rest=rest)
            case "tags_with_separator":
                return self._separated(form, path)
            case "any_text" | "triggered_tags":
                raise wrong(path, f"{kind} goes on to the end of the answer; it must be the last of a sequence")
        raise wrong(f"{path}.type", f"got {quoted(kind)}; must be one of {PARTS}")

    def triggered(self, tags: Any, triggers: Any, path: str, key: str, star: str, *, rest: bool) -> str:
        """Free text in which a trigger opens one of the tags that begin with it."""
        if not isinstance(tags, list) or not tags:
            raise wrong(f"{path}{key}", f"got {quoted(tags)}; must be a list of at least one tag")
        if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers or [0]):
            raise wrong(f"{path}.triggers", f"got {quoted(triggers)}; must be texts, none of them empty")
        if len(tags) + len(triggers) > self._limits.schema_max_enum:  # each tag is compared with all triggers
            counts = f"has {len(tags)} tags and {len(triggers)} triggers; at most {self._limits.schema_max_enum} in all"
            raise too_complex(path, f"{counts} are allowed (--schema-max-enum)")
        opened: dict[str, list[str]] = {}
        for at, tag in enumerate(tags):
            where = f"{path}{key}[{at}]"
            begin = self._begin(tag, where)
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise wrong(
                    f"{where}.begin", f"got {quoted(begin)}; must begin with one of the triggers {quoted(triggers)}"
                )
            opened.setdefault(trigger, []).append(self._tag(tag, where, begin.removeprefix(trigger)))
        called = []
        for trigger, ways in opened.items():
            name = self._name("called")
            self.rules.append(f"open_{name}[lazy]: {ANY} {literal(trigger)}")
            self.rules.append(f"{name}: open_{name} ({' | '.join(f'({way})' for way in ways)})")
            called.append(name)
        if not rest and not star:
            return f"({' | '.join(called)})"
        terminal = self._name("REST").upper()
        self.rules.append(f"{terminal}: {ANY} & ~/(?s:.*)({'|'.join(map(plain, triggers))})(?s:.*)/")
        if not rest:  # one tag ends the answer, or there is none
            return f"({' | '.join(called)} | {terminal})"
        return f"({' | '.join(called)}){star} {terminal}"

    def _several(self, form: dict[str, Any], kind: str, path: str, last: bool) -> str:
        elements = form.get("elements")
        if not isinstance(elements, list) or not elements:
            raise wrong(f"{path}.elements", f"got {quoted(elements)}; must be a list of at least one part")
        ends = len(elements) - 1 if kind == "sequence" else None
        parts = [
            self.part(one, f"{path}.elements[{at}]", last=last and ends in (None, at))
            for at, one in enumerate(elements)
        ]
        return self._ruled(parts, " " if kind == "sequence" else " | ")

    def _separated(self, form: dict[str, Any], path: str) -> str:
        tags, separator = form.get("tags"), self._text(form, "separator", path)
        if not isinstance(tags, list) or not tags:
            raise wrong(f"{path}.tags", f"got {quoted(tags)}; must be a list of at least one tag")
        tag = self._ruled([self._tag(one, f"{path}.tags[{at}]") for at, one in enumerate(tags)], " | ")
        several = tag if form.get("stop_after_first") else f"{tag} ({literal(separator)} {tag})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _tag(self, tag: Any, path: str, begin: str | None = None) -> str:
        """A tag; `begin` is the rest of its beginning, if its trigger has been read already."""
        begin = self._begin(tag, path) if begin is None else begin
        ends = tag.get("end")
        texts = ends if isinstance(ends, list) and ends else [ends]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(path, "needs the texts `begin` and `end`")
        content, opening = tag.get("content"), literal(begin)
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not all(texts):
                raise wrong(f"{path}.end", "must not be empty after any_text")
            name = self._name("text")
            self.rules.append(f"{name}[lazy]: {ANY} ({' | '.join(map(literal, texts))})")
            return f"{opening} {name}".strip()
        held = self.part(content, f"{path}.content", last=False)
        closing = " | ".join(literal(text) for text in texts if text)
        optional = "" if all(texts) else "?"
        return " ".join(filter(None, (opening, held, f"({closing}){optional}" if closing else "")))

    def _begin(self, tag: Any, path: str) -> str:
        begin = tag.get("begin") if isinstance(tag, dict) else None
        if not isinstance(begin, str):
            raise wrong(path, "needs the texts `begin` and `end`")
        return begin

    def _text(self, form: dict[str, Any], key: str, path: str) -> str:
        text = form.get(key)
        if not isinstance(text, str) or not text:
            raise wrong(f"{path}.{key}", f"got {quoted(text)}; must be a text that is not empty")
        return text

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"

    def _ruled(self, parts: Sequence[str], between: str) -> str:
        """Put the parts into a rule of their own, since parts are nested."""
        name = self._name("part")
        self.rules.append(f"{name}: {between.join(f'({one})' for one in parts)}")
        return name
