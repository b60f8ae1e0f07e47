"""Notations: how each call format writes the values of arguments (structure/call_values.py).

Owner: none, an object per tool, in the pool. In: a schema of one type. Out: the Lark of its spelling, as the format's
parser reads it.

    Json      {"k": "text", "n": [1, 2]}
    Tagged    <parameter=k>text</parameter>       strings unchanged, everything else as JSON
    Braces    {k:<|"|>text<|"|>,n:[1,2]}          strings between markers, keys without quotes
    Elements  M<k>text M</k> M<l>M<item>1 ...     nested elements; M precedes every tag
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from server.output.tools.base import converted, quoted
from server.structure.call_values import (
    NUMBERS,
    Tool,
    Union,
    Values,
    alternatives,
    counted,
    in_order,
    joined,
    literal,
    spelled,
)

BARE = re.compile(r"[A-Za-z0-9_.-]+\Z")


class Json(Values):
    """JSON's own notation."""

    def _branch(self, schema: dict[str, Any], union: Union, path: str) -> str:
        return self.json(schema)

    def _any(self) -> str:
        return self.json(True)


class Tagged(Values):
    """Text up to a tag. If tags say whether a value is text, only values that can be nothing but strings are text."""

    def __init__(
        self,
        tool: Tool,
        at: int,
        ids: Mapping[str, int],
        can_name: Callable[[str], bool],
        *,
        line: str,
        end: str,
        signed: bool,
    ) -> None:
        super().__init__(tool, at, ids, can_name)
        self._line, self._end, self._signed = line, end, signed

    def parameter(self, schema: Any, path: str) -> str:
        """The Lark of one value and the tag that ends it."""
        if self._signed and self.kinds(schema) != {"string"}:
            return joined(self.json(schema), spelled(self._end, self._ids))
        return joined(literal(self._line), self.value(schema, path))

    def _branch(self, schema: dict[str, Any], union: Union, path: str) -> str:
        closing = joined(literal(self._line), spelled(self._end, self._ids))
        if schema.get("type") == "string":
            return self.text(schema, union, self._line + self._end, path)
        if "enum" not in schema:
            return joined(self.json(schema), closing)
        texts = readable(schema["enum"], union, self._end)
        others = [value for value in schema["enum"] if not isinstance(value, str)]
        ways = [*map(literal, texts), *([self.json({"enum": others})] if others else ())]
        return joined(alternatives(ways), closing) if ways else ""

    def _any(self) -> str:
        return self.text({}, Union(), self._line + self._end, self._tool.path)


class Braces(Values):
    """Gemma's format, with keys in alphabetical order."""

    marks_strings = True

    def __init__(self, tool: Tool, at: int, ids: Mapping[str, int], quote: str) -> None:
        super().__init__(tool, at, ids, lambda name: quote not in name)
        self._quote = quote
        self._quoted = spelled(quote, ids)

    def _ordered(self, members: dict[str, Any]) -> list[tuple[str, Any]]:
        return sorted(members.items(), key=lambda member: member[0].lower())  # the order of Gemma's templates

    def _branch(self, schema: dict[str, Any], union: Union, path: str) -> str:
        if "enum" in schema:
            ways = [self._constant(value) for value in schema["enum"] if self._quote not in texts_in(value)]
            return alternatives(ways) if ways else ""
        kind = schema["type"]
        if kind == "string":
            return joined(self._quoted, self.text(schema, union, self._quote, path))
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        return self.json({key: schema[key] for key in ("type", *NUMBERS) if key in schema})

    def _any(self) -> str:
        ways = [self._branch({"type": kind}, Union(), self._tool.path) for kind in ("string", "object", "array")]
        return alternatives([*ways, self.json({"type": ["number", "boolean", "null"]})])

    def arguments_object(self) -> str:
        """The Lark of all arguments as one object."""
        return self.value({"type": "object", **self._resolved(self._root)}, self._tool.path)

    def _object(self, schema: dict[str, Any], path: str) -> str:
        name, members = self.named(), self.members(schema, path)
        pairs = [
            (needed, joined(self._key(key), '":"', self.value(value, f"{path}.properties.{key}")))
            for key, needed, value in members
        ]
        extra, rest = "", schema.get("additionalProperties", not members)
        if rest is not False:
            extra = joined(self.other_name(name, members), '":"', self.value(rest, f"{path}.additionalProperties"))
        start, rules = in_order(pairs, ",", name, extra)
        self.rules += rules
        return joined('"{"', start, '"}"')

    def _array(self, schema: dict[str, Any], path: str) -> str:
        first = [self.value(item, f"{path}.prefixItems") for item in schema.get("prefixItems", ())]
        low, high = self._bounds(schema, len(first), path)
        rest = schema.get("items", True)
        more = "" if rest is False or high == 0 else self.value(rest, f"{path}.items")
        tail = counted(more, ",", low, high, first=not first) if more else ""
        return joined('"["', ' "," '.join(first), tail, '"]"')

    def _key(self, name: str) -> str:
        return literal(name) if BARE.match(name) else joined(self._quoted, literal(name), self._quoted)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return joined(self._quoted, literal(value), self._quoted)
        if isinstance(value, list):
            return joined('"["', ' "," '.join(map(self._constant, value)), '"]"')
        if isinstance(value, dict):
            pairs = (joined(self._key(key), '":"', self._constant(item)) for key, item in self._ordered(value))
            return joined('"{"', ' "," '.join(pairs), '"}"')
        return literal(json.dumps(value))


class Elements(Values):
    """MiniMax-M3's format. The Lark of a value includes the mark of its closing tag."""

    def __init__(self, tool: Tool, at: int, ids: Mapping[str, int], mark: str) -> None:
        super().__init__(tool, at, ids, lambda name: BARE.match(name) is not None)
        self._mark = mark
        self._marked = spelled(mark, ids)

    def _branch(self, schema: dict[str, Any], union: Union, path: str) -> str:
        if "enum" in schema:
            others = [json.dumps(value) for value in schema["enum"] if not isinstance(value, str | list | dict)]
            ways = list(map(literal, [*readable(schema["enum"], union, self._mark), *others]))
            return joined(alternatives(ways), self._marked) if ways else ""
        kind = schema["type"]
        if kind == "string":
            return self.text(schema, union, self._mark, path)
        if kind == "object":
            return joined(self._object(schema, path, '"{}"'), self._marked)
        if kind == "array":
            return self._array(schema, path)
        return joined(self.json({key: schema[key] for key in ("type", *NUMBERS) if key in schema}), self._marked)

    def _any(self) -> str:
        return self.text({}, Union(), self._mark, self._tool.path)

    def parameters(self) -> str:
        """The Lark of all arguments, one element each."""
        return self._object(self.arguments(), self._tool.path, '""')

    def _object(self, schema: dict[str, Any], path: str, none: str) -> str:
        name, members = self.named(), self.members(schema, path)
        elements = [
            (needed, self._element(literal(key), self.value(value, f"{path}.properties.{key}")))
            for key, needed, value in members
        ]
        extra, rest = "", schema.get("additionalProperties", not members)
        if rest is not False:
            other = self.other_name(name, members)
            extra = self._element(other, self.value(rest, f"{path}.additionalProperties"))
        start, rules = in_order(elements, "", name, extra, none)
        self.rules += rules
        return start

    def _element(self, name: str, value: str) -> str:
        return joined(self._marked, '"<"', name, '">"', value, '"</"', name, '">"')

    def _array(self, schema: dict[str, Any], path: str) -> str:
        if "prefixItems" in schema:
            self._leave("prefixItems", path)
        low, high = self._bounds(schema, 0, path)
        rest = schema.get("items", True)
        if rest is False or high == 0:
            return joined('"[]"', self._marked)
        item = self._element('"item"', self.value(rest, f"{path}.items"))
        some = counted(item, "", max(low, 1), high)
        return joined(some if low else f'({some} | "[]")', self._marked)


def readable(values: Iterable[Any], union: Union, end: str) -> list[str]:
    """The strings among the values that the parser reads back unchanged."""
    return [
        value
        for value in values
        if isinstance(value, str)
        and end not in value
        and (not union.kinds or converted(value, union.kinds | {"string"}) == quoted(value))
    ]


def texts_in(value: Any) -> str:
    """All strings in a value, including keys, separated by spaces."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return " ".join(f"{key} {texts_in(item)}" for key, item in value.items())
    return " ".join(map(texts_in, value)) if isinstance(value, list) else ""
