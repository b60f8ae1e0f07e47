"""Values: write the schema of a tool's arguments as Lark, for formats that do not write arguments as JSON.

Owner: none, an object per tool while its grammar is written, in the pool. In: a schema reduced to the keywords that a
grammar can enforce. Out: rules, and for each value the Lark of its spelling. What a notation cannot enforce is refused
for strict tools and left out for others. A union is restricted to the values that the parser can distinguish.

The notations are in structure/call_notations.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from server.errors import quoted
from server.output.tools.base import kinds_of
from server.structure.patterns import searched
from server.structure.schema_faults import too_complex, wrong
from server.structure.schema_keywords import NUMBERS, TYPES, subschemas

SchemaText = Callable[[Any, str], str]  # (schema, its path in the request) -> text for %json
Leave = Callable[[str, str], None]  # (keyword, path) that a notation cannot enforce: raises, or reports
SHORT = 40
MOST_REPEATS = 2000  # the most repetitions in a counted text or list
MOST_PARTS = 4096  # the most parts of all anyOf and allOf of one tool
BY_TYPE = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array",
           "prefixItems": "array", "minItems": "array", "maxItems": "array", "patterns": "string", "format": "string",
           "minLength": "string", "maxLength": "string", **dict.fromkeys(NUMBERS, "number")}  # fmt: skip
NOT_HELD = ("patternProperties", "minProperties", "maxProperties", "propertyNames")
# The first characters of texts that a parser may read as a type other than string.
BRACKETS, DIGITS = r"\{\[\(", r"\-+.0-9_"
FIRST = {"object": BRACKETS, "array": BRACKETS, "number": DIGITS, "integer": DIGITS, "unknown": BRACKETS + DIGITS}
WORDS = r"~/\s*(null|None|true|false|True|False)\s*/"


@dataclass(frozen=True, slots=True)
class Union:
    """The alternatives to a string in the same place."""

    kinds: frozenset[str] = frozenset()  # the types that the parser distinguishes from strings
    words: tuple[str, ...] = ()  # null and booleans, included in the string's expression


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool that may be called."""

    name: str
    parameters: Mapping[str, Any]
    path: str  # the path of its parameters in the request
    text: SchemaText  # refuses or leaves out what cannot be enforced
    leave: Leave


def literal(text: str) -> str:
    """A Lark string literal; "" if the text is empty."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def spelled(text: str, ids: Mapping[str, int]) -> str:
    """A text as Lark, with its marker tokens as ids."""
    for marker in sorted(ids, key=len, reverse=True):
        if marker in text:
            before, _, after = text.partition(marker)
            return " ".join(filter(None, (spelled(before, ids), f"<[{ids[marker]}]>", spelled(after, ids))))
    return literal(text)


def before_token(marker: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """(the letters before the first token in a marker, the marker from there on); (marker, "") if it contains
    no token.
    """
    places = [(at, -len(name)) for name in ids if (at := marker.find(name)) >= 0]
    at = min(places)[0] if places else len(marker)
    return marker[:at], marker[at:]


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def without(marker: str) -> str:
    """A Lark expression for every text that does not contain a marker."""
    return f"/(?s:.*)/ & ~/(?s:.*){plain(marker)}(?s:.*)/"


def plain(text: str) -> str:
    """A text as a regular expression between slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


class Values(ABC):
    """Builds the rules for one tool's values. A notation defines how a value of one type is spelled, and how
    any value is.
    """

    marks_strings = False  # strings are between marks, so no string is read as another type

    def __init__(
        self, tool: Tool, at: int, ids: Mapping[str, int], can_name: Callable[[str], bool] = lambda name: True
    ) -> None:
        """`can_name`: whether a parameter of this name can be written and read back."""
        self.rules: list[str] = []
        self._can_name = can_name
        self._tool, self._ids, self._prefix = tool, ids, f"{at}"
        self._root: dict[str, Any] = orjson.loads(tool.text(tool.parameters, tool.path))
        self._options = self._root.pop("x-guidance")
        self._schemas = dict(subschemas(self._root))
        self._count = self._num_parts = 0
        self._named: dict[str, str] = {}  # rules for each $ref, and for any value

    def arguments(self) -> dict[str, Any]:
        """The merged schema of all arguments, written one by one: anyOf, enum and const are refused or dropped."""
        schema = self.merged({"type": "object", **self._resolved(self._root)}, self._tool.path)
        for key in ("anyOf", "enum", "const"):
            if key in schema:
                self._leave(key, self._tool.path)
        return schema

    def kinds(self, schema: Any) -> frozenset[str]:
        """The types that the parser distinguishes."""
        return kinds_of(schema, self._root)

    def members(self, schema: dict[str, Any], path: str) -> list[tuple[str, bool, Any]]:
        """(name, whether it is required, schema) of each property of an object, in writing order."""
        for key in NOT_HELD:
            if key in schema:
                self._leave(key, path)
        named, needed = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties", True)
        missing = {name: rest for name in needed if name not in named}
        found = [(name, name in needed, value) for name, value in self._ordered({**named, **missing})]
        for name, _, _ in found:
            if not self._can_name(name):
                self._tool.leave("properties", f"{path}.properties.{quoted(name)}")
        return [member for member in found if self._can_name(member[0])]

    def value(self, schema: Any, path: str) -> str:
        """The Lark of one value."""
        if schema is True or schema == {}:
            return self._once("any", self._any)
        if schema is False:
            raise wrong(path, "no value satisfies it")
        if "$ref" in schema:
            for key in schema.keys() - {"$ref", "$defs", "definitions"}:
                self._leave(key, path)
            return self._once(schema["$ref"], lambda: self.value(self._target(schema["$ref"]), path))
        schema = self.merged(schema, path)
        branches = [
            narrowed
            for branch in self._branches(schema, path)
            for kind in _kinds(branch)
            if (narrowed := _narrowed(branch, kind)) is not None
        ]
        if not branches:
            raise wrong(path, "no value satisfies it")
        union = self._union(schema, branches)
        if union.words:  # they are part of the string's expression
            branches = [branch for branch in branches if branch.get("type") not in ("null", "boolean")]
        ways = dict.fromkeys(way for branch in branches if (way := self._branch(branch, union, path)))
        if not ways:
            raise wrong(path, "none of its values can be written in this model's form of calls")
        found = alternatives(list(ways))
        if len(found) < SHORT:
            return found
        name = self.named()  # members and lists repeat their values: inline text would double with each level
        self.rules.append(f"{name}: {found}")
        return name

    def merged(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The schema with its allOf merged into it; refuses or reports keywords in which the parts differ."""
        found = {key: value for key, value in schema.items() if key not in ("allOf", "pattern")}
        if "pattern" in schema:
            found["patterns"] = [*found.get("patterns", ()), schema["pattern"]]
        for part in schema.get("allOf", ()):
            self._num_parts += 1
            if self._num_parts > MOST_PARTS:  # parts that name the same parts double with each level
                raise too_complex(path, f"its anyOf and allOf unfold into more than {MOST_PARTS} parts")
            part = self.merged(self._resolved(part), path)
            for key, value in part.items():
                if key == "properties" and not found.get(key, {}).keys() & value.keys():
                    found[key] = {**found.get(key, {}), **value}
                elif key in ("required", "patterns"):
                    found[key] = list(dict.fromkeys((*found.get(key, ()), *value)))
                elif found.setdefault(key, value) != value and key not in ("$defs", "definitions"):
                    self._leave("allOf", path)
        return found

    def text(self, schema: dict[str, Any], union: Union, end: str, path: str) -> str:
        """The rule for a string and the marker `end` after it; excludes texts that the parser would read as
        another type.
        """
        name, limits = self.named(), [without(end.removeprefix("\n"))]
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if high is not None and low > high:
            raise wrong(
                path, f"minLength {low} is above maxLength {high}, so no text fits; lower one or raise the other"
            )
        if max(low, high or 0) > MOST_REPEATS:
            self._leave("minLength" if high is None else "maxLength", path)
        elif low or high is not None:
            limits.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        for pattern in schema.get("patterns", ()):
            expression = searched(pattern)
            if expression is None:
                self._leave("pattern", path)
            else:
                limits.append(expression)
        if "format" in schema:
            self._leave("format", path)
        looks = "".join(dict.fromkeys(FIRST[kind] for kind in sorted(union.kinds) if kind in FIRST))
        if looks:
            limits.append(rf"/\s*[^\s{looks}](?s:.*)|\s*/")
        if union.kinds & {"null", "boolean", "unknown"}:
            limits.append(WORDS)
        terminal = f"TEXT_{name.upper()}"
        whole = " | ".join((f"({' & '.join(limits)})", *map(literal, union.words)))
        letters, marker = before_token(end, self._ids)
        if marker:  # TEXT ends before a token
            self.rules.append(f"{terminal}: ({whole}) {literal(letters)}")
            self.rules.append(f"{name}: {terminal} {spelled(marker, self._ids)}")
        else:
            self.rules.append(f"{terminal}: {whole}")
            self.rules.append(f"{name}[lazy]: {terminal} {literal(end)}")
        return name

    def _leave(self, keyword: str, path: str) -> None:
        self._tool.leave(keyword, f"{path}.{keyword}")

    def named(self) -> str:
        """A new, unique rule name."""
        self._count += 1
        return f"v{self._prefix}_{self._count}"

    def json(self, schema: Any) -> str:
        """Add a rule for the JSON of a checked schema, and return its name."""
        name, given = self.named(), schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        text = orjson.dumps({**given, "x-guidance": self._options})
        if b'"$ref"' in text:
            defs = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            text = orjson.dumps({**defs, **given, "x-guidance": self._options})
        self.rules.append(f"{name}: %json {text.decode()}")
        return name

    def other_name(self, owner: str, members: Sequence[tuple[str, bool, Any]]) -> str:
        """A terminal for a property's name other than those of `members`."""
        but = "|".join(plain(name) for name, _, _ in members if name)
        self.rules.append(f"NAME_{owner.upper()}: /[A-Za-z_][A-Za-z0-9_.-]*/" + (f" & ~/({but})/" if but else ""))
        return f"NAME_{owner.upper()}"

    # -- what a notation defines

    def _ordered(self, members: dict[str, Any]) -> list[tuple[str, Any]]:
        return list(members.items())

    @abstractmethod
    def _branch(self, schema: dict[str, Any], union: Union, path: str) -> str:
        """The Lark of a value of one type, or of an enum; "" if it cannot be written."""

    @abstractmethod
    def _any(self) -> str:
        """The Lark of any value."""

    # -- schemas

    def _union(self, schema: dict[str, Any], branches: list[dict[str, Any]]) -> Union:
        """The alternatives to strings among a schema's branches."""
        if self.marks_strings:
            return Union()
        types, values = {branch.get("type") for branch in branches}, [v for b in branches for v in b.get("enum", ())]
        words: tuple[str, ...] = ()
        if "string" in types:
            words += ("null",) if "null" in types or None in values else ()
            words += ("true", "false") if "boolean" in types else ()
        return Union(self.kinds(schema) - {"string"}, words)

    def _bounds(self, schema: dict[str, Any], given: int, path: str) -> tuple[int, int | None]:
        """The (least, most) number of items after the first `given`; most is None if unlimited."""
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if max(low, high or 0) > MOST_REPEATS:
            self._leave("minItems" if high is None else "maxItems", path)
            return 0, None
        return max(low - given, 0), None if high is None else max(high - given, 0)

    def _once(self, key: str, make: Callable[[], str]) -> str:
        """The name of a rule made once per `key`; the rule may refer to itself."""
        if key not in self._named:
            name = self._named[key] = f"n{self._prefix}_{len(self._named)}"
            self.rules.append(f"{name}: {make()}")
        return self._named[key]

    def _target(self, pointer: str) -> Any:
        return self._schemas[unquote(pointer)]

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """A schema with its $ref resolved; Cleaner has already refused dangling references."""
        while isinstance(schema, dict) and "$ref" in schema:
            rest = {key: schema[key] for key in schema if key != "$ref"}
            target = self._target(schema["$ref"])
            schema = {**(target if isinstance(target, dict) else _as_object(target)), **rest}
        return schema if isinstance(schema, dict) else _as_object(schema)

    def _branches(self, schema: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """The alternatives of anyOf, each merged with the schema's other keywords."""
        if "anyOf" not in schema:
            return [schema]
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        found = []
        for branch in schema["anyOf"]:
            if branch is not False:
                whole = self.merged({**rest, "allOf": [branch if isinstance(branch, dict) else {}]}, path)
                found += self._branches(whole, path)
        return found


def _as_object(schema: Any) -> dict[str, Any]:
    """The boolean schemas true and false as objects."""
    return {"enum": []} if schema is False else {}


def _kinds(schema: dict[str, Any]) -> list[str]:
    """The types of a schema without anyOf. Without `type`, they follow from the keywords; without those, any type."""
    if "const" in schema or "enum" in schema:
        return ["enum"]
    named = schema.get("type") or next((BY_TYPE[key] for key in schema if key in BY_TYPE), list(TYPES[:-1]))
    return [named] if isinstance(named, str) else list(named)


def _narrowed(schema: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The schema reduced to one type; None if no value remains."""
    if kind != "enum":
        return {**{key: value for key, value in schema.items() if key != "patterns" or kind == "string"}, "type": kind}
    values = [schema["const"]] if "const" in schema else schema["enum"]
    named = schema.get("type", list(TYPES))
    allowed = {named} if isinstance(named, str) else {*named}
    taken = [value for value in values if _kind_of(value) & allowed]
    return {"enum": taken} if taken else None


def _kind_of(value: Any) -> frozenset[str]:
    found = kinds_of({"const": value}, None)
    return found | {"number"} if "integer" in found else found


def alternatives(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else "(" + " | ".join(f"({way})" for way in ways) + ")"


def counted(item: str, separator: str, low: int, high: int | None, *, first: bool = True) -> str:
    """`low` to `high` items; "" if there are none. `first` is False if an item precedes, so a separator comes first."""
    if high == 0:
        return ""
    one, most = joined(literal(separator), item), "" if high is None else high
    if not first or not separator:
        return f"({one}){{{low},{most}}}"
    more = "" if high == 1 else f"({one}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    return joined(item, more) if low else f"({joined(item, more)})?"


def in_order(
    members: Sequence[tuple[bool, str]], separator: str, name: str, extra: str = "", none: str = '""'
) -> tuple[str, list[str]]:
    """(first rule, all rules) for members in their order, optional ones possibly absent, then any number of `extra`.

    Each member has two rules for the rest of the list: one if a member precedes, one if none does. If no member comes
    at all, `none` is written.
    """
    after, start, last = f"{name}_after_", f"{name}_from_", len(members)
    more = f"({joined(literal(separator), extra)})*" if extra else '""'
    rules = [f"{after}{last}: {more}", f"{start}{last}: " + (f"{extra} {after}{last} | {none}" if extra else none)]
    for at in reversed(range(last)):
        needed, text = members[at]
        here = joined(literal(separator), text)
        rules.append(f"{after}{at}: {here if needed else f'({here})?'} {after}{at + 1}")
        skipped = "" if needed else f" | {start}{at + 1}"
        rules.append(f"{start}{at}: {text} {after}{at + 1}{skipped}")
    return f"{start}0", rules
