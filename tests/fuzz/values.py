"""Edits JSON values by bytes: most damaged texts are not JSON, so they never reach the code behind the JSON parser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

MOST_PLACES = 200  # places of a value; each copy may double their number
OPS = ("put", "rename", "remove", "copy", "wrap")
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63 - 1, -(2**63), 2**64, 0.5, 1e308, "", "a", "é\x00😀", [], [0], {},
    {"a": None}, "string", "object", "integer", "array", "^(a|b)*$", "(?=a)", "#", "#/$defs/c", "date-time", ["a", "a"],
    {"type": "string"}, [{"type": "null"}, {}], {"$ref": "#"}, {"role": "user", "content": "b"},
)  # fmt: skip
NAMES = (
    "type", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", "then", "else", "properties", "required", "items",
    "prefixItems", "additionalProperties", "patternProperties", "propertyNames", "minItems", "maxItems", "uniqueItems",
    "minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "$ref", "$defs",
    "minProperties", "maxProperties", "contains", "dependentRequired", "unevaluatedProperties", "a", "", "x-guidance",
)  # fmt: skip


def edited(value: Any, data: bytes) -> Any:
    """A copy of a list or dict with one edit per four bytes: the bytes select place, operation and value."""
    root = [copy.deepcopy(value)]
    for at in range(0, len(data) - 3, 4):
        where, how, what = int.from_bytes(data[at : at + 2], "big"), data[at + 2], data[at + 3]
        places = list(places_of(root))
        if len(places) > MOST_PLACES:
            break
        holder, key = places[where % len(places)]
        edit(holder, key, OPS[how % len(OPS)], what, places)
    return root[0]


def edit(holder: Any, key: Any, how: str, what: int, places: list[tuple[Any, Any]]) -> None:
    if how == "put":
        holder[key] = copy.deepcopy(STRANGE[what % len(STRANGE)])
    elif how == "rename" and isinstance(holder, dict):
        holder[NAMES[what % len(NAMES)]] = holder.pop(key)
    elif how == "remove" and len(places) > 1 and places[0][0] is not holder:
        del holder[key]
    elif how == "copy":
        other, name = places[what % len(places)]
        holder[key] = copy.deepcopy(other[name])
    elif how == "wrap":
        name = NAMES[what % len(NAMES)]
        holder[key] = [holder[key]] if what % 3 == 0 else {name: holder[key]}


def places_of(holder: Any) -> Iterator[tuple[Any, Any]]:
    """(list or dict, index or key) of every element, outer elements first."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], list | dict):
            yield from places_of(holder[key])
