"""Schemas in the style of people and programs: answers, tools of agents, recursion, unions, old drafts."""

from __future__ import annotations

from typing import Any


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TEXT: dict[str, Any] = {"type": "string", "maxLength": 12}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 100}
CITY = {"type": "string", "description": "City and state, e.g. San Francisco, CA", "maxLength": 20}
POINT = {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False, "minItems": 2}
TREE = closed(value=COUNT, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2})
LIST = closed(head=COUNT, tail={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
SHAPES = [closed(kind={"const": "circle"}, radius=COUNT), closed(kind={"const": "square"}, side=COUNT)]

ENFORCED: list[dict[str, Any]] = [
    closed(location=CITY, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    {"type": "object", "properties": {"location": CITY, "days": COUNT}, "required": ["location"], "title": "weather"},
    closed(query=TEXT, top_k={"type": "integer", "default": 5, "minimum": 1, "maximum": 50}, filters={"type": "null"}),
    closed(command=TEXT, timeout={"type": ["integer", "null"], "minimum": 0, "maximum": 600}),
    closed(path={"type": "string", "pattern": "^/[a-z]{1,5}(/[a-z]{1,5}){0,2}$"}, old=TEXT, new=TEXT),
    closed(edits={"type": "array", "items": closed(line=COUNT, text=TEXT), "minItems": 1, "maxItems": 3}),
    closed(to={"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 2}, subject=TEXT),
    closed(start={"type": "string", "format": "date-time"}, end={"type": "string", "format": "date-time"}),
    closed(sentiment={"enum": ["positive", "negative", "neutral"]}, confidence={"type": "number", "minimum": 0}),
    closed(answer={"type": "boolean"}, reason=TEXT),
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    LIST,
    {"oneOf": SHAPES},
    {"type": "array", "items": {"oneOf": SHAPES}, "maxItems": 2},
    {"anyOf": [closed(text=TEXT), closed(code=COUNT), {"type": "null"}]},
    {"$schema": "http://json-schema.org/draft-07/schema#",
     "definitions": {"p": closed(x=COUNT)}, "$ref": "#/definitions/p"},
    {"type": "array", "items": [{"type": "integer"}, TEXT], "additionalItems": False, "minItems": 2, "maxItems": 2},
    {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 20},
    {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, {"properties": {"b": TEXT}}]},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,4}$"}, "additionalProperties": COUNT, "maxProperties": 3},
    {"type": "object", "propertyNames": {"enum": ["left", "right"]}, "additionalProperties": TEXT},
    {"$defs": {"side": {"enum": ["left", "right"], "title": "Side", "type": "string"}},
     "type": "object", "propertyNames": {"$ref": "#/$defs/side"}, "additionalProperties": TEXT},
    {"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": TEXT}, "additionalProperties": False,
     "maxProperties": 2},
    {"type": "object", "properties": {"a": COUNT}, "required": ["a"], "unevaluatedProperties": False},
    {"enum": ["a", 1, None, True, [1, 2], {"k": "v"}, 1.5, ""]},
    {"const": {"nested": [1, {"deep": "é\"\\\n"}]}},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date", "pattern": "^20[0-9]{2}-02-2"},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 200},
    {"type": ["string", "integer", "null"], "maxLength": 3, "minimum": 5, "maximum": 9},
    {"type": "object", "additionalProperties": {"type": "array", "items": COUNT, "maxItems": 2}, "maxProperties": 2},
    {**closed(**{"a/b": COUNT, "a~b": COUNT, "": TEXT}), "required": ["", "a/b"]},
    {"$defs": {"a/b": COUNT}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}, "maxItems": 2},
    {"x-guidance": {"lenient": True}, **closed(**{"x-guidance": COUNT})},
    {**closed(**{"type": TEXT, "properties": TEXT, "$ref": TEXT}), "required": ["$ref"]},
    closed(steps={"type": "array", "items": closed(explanation=TEXT, output=TEXT), "maxItems": 2}, final=TEXT),
    closed(rows={"type": "array", "items": {"type": "array", "items": COUNT, "maxItems": 2}, "maxItems": 3}),
    closed(url={"type": "string", "format": "uri", "pattern": "^https://[a-z]{1,5}\\.com$"}, retries=COUNT),
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "minItems": 8, "maxItems": 8},
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": COUNT, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {"type": "object"}, "then": {"required": ["a"]}}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"minLength": 2}}, "propertyNames"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "object", "allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "pattern": "^(?!x)"}, "pattern"),
    ({"type": "string", "format": "iri"}, "format"),
    ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
    ({"$ref": "https://example.com/schema"}, "$ref"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": COUNT}, "maxProperties": 1}, "maxProperties"),
]
