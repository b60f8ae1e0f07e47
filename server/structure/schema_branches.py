"""Check whether the branches of a oneOf exclude each other: then anyOf, which a grammar can enforce, means the same.

Owner: none, pure functions. In: branches, and a function that resolves a $ref. Out: True if no value can satisfy two
branches, judged by type, by const or enum, or by those of a property that both require.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.structure.schema_keywords import TYPES

MAX_BRANCHES = 64  # the most branches to compare with each other
Resolve = Callable[[Any], dict[str, Any]]


def are_apart(branches: list[Any], resolved: Resolve) -> bool:
    """Whether no value can satisfy two branches."""
    if len(branches) > MAX_BRANCHES:
        return False
    targets = [resolved(branch) for branch in branches]
    pairs = ((a, b) for at, a in enumerate(targets) for b in targets[at + 1 :])
    return all(exclude(a, b, resolved) for a, b in pairs)


def exclude(a: dict[str, Any], b: dict[str, Any], resolved: Resolve) -> bool:
    """Whether no value can satisfy both."""
    if not _types(a) & _types(b):
        return True
    values = _consts(a), _consts(b)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if _types(a) | _types(b) != {"object"}:
        return False
    for name in {*a.get("required", ())} & {*b.get("required", ())}:
        first, second = (resolved(side.get("properties", {}).get(name)) for side in (a, b))
        if _exclude_values(first, second):
            return True
    return False


def _exclude_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether no value of a property can satisfy both."""
    values = _consts(a), _consts(b)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    return not _types(a) & _types(b)


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema may allow; integers are numbers."""
    named = schema.get("type")
    if named is None:
        values = _consts(schema)
        return set(TYPES) - {"integer"} if values is None else {kind for kind, _ in values}
    names = [named] if isinstance(named, str) else named
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _consts(schema: dict[str, Any]) -> set[tuple[str, Any]] | None:
    """The values that `const` or `enum` allow, as (type, value); None if neither is given."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {_named_value(value) for value in values} if isinstance(values, list) else None


def _named_value(value: Any) -> tuple[str, Any]:
    """(type, value); None is the value of objects and arrays, which are not compared."""
    for kind, of in (("null", type(None)), ("boolean", bool), ("number", (int, float)), ("string", str)):
        if isinstance(value, of):
            return kind, value
    return ("array" if isinstance(value, list) else "object"), None
