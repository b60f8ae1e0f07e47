"""Reduce a JSON Schema to what a grammar enforces exactly: each keyword is passed on, rewritten exactly, or reported.

Owner: none, pure functions; called in the pool, since a large schema takes tens of milliseconds. In: a client's schema.
Out: a schema with only those keywords that the grammar library enforces. A keyword that the library cannot enforce is
refused with its path; for tools without `strict` it is left out and listed in `dropped`. Annotations and unknown
keywords constrain nothing and are left out, including the library's own options (x-guidance).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from server.errors import ApiError, quoted
from server.flags.config import LimitsConfig
from server.structure.exact_numbers import EXACT, MOST_REMAINDERS, are_exact, inside, num_remainders
from server.structure.patterns import check_pattern, json_pattern
from server.structure.schema_branches import are_apart
from server.structure.schema_faults import too_complex, wrong
from server.structure.schema_formats import ENFORCED, FORMATS, format_rules
from server.structure.schema_keywords import COUNTS, NAMED_OF, NUMBERS, SCHEMA_OF, SCHEMAS_OF, TYPES, subschemas

NEVER: tuple[tuple[str, tuple[Any, ...]], ...] = (  # keyword, and its values that constrain nothing
    ("uniqueItems", (False,)), ("contains", ()), ("minContains", (0,)), ("maxContains", ()), ("not", (False,)),
    ("if", ()), ("then", ()), ("else", ()), ("dependentRequired", ({},)), ("dependentSchemas", ({},)),
    ("dependencies", ({},)), ("unevaluatedItems", (True, {})), ("$dynamicRef", ()), ("$recursiveRef", ()),
)  # fmt: skip


class Cleaner:
    """One pass over one schema."""

    def __init__(self, root: Any, limits: LimitsConfig, relax: bool) -> None:
        self._root, self._limits, self._relax = root, limits, relax
        self._ended: set[str] = set()  # values of $ref whose chain ends at a schema without $ref
        self._expressions: dict[str, str] = {}  # pattern -> rewritten for JSON; large schemas repeat patterns
        self.dropped: dict[str, None] = {}  # keywords left out, in order of appearance

    @cached_property
    def _schemas(self) -> dict[str, Any]:
        """JSON pointer -> schema; computed when the first $ref is resolved."""
        return dict(subschemas(self._root))

    def clean(self, schema: Any, path: str) -> Any:
        """The schema without keywords that constrain nothing or cannot be enforced."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise wrong(path, "must be a schema: an object, true or false")
        found: dict[str, Any] = {}
        for key, value in schema.items():
            clean = _CLEAN.get(key)
            if clean is not None:
                try:
                    clean(self, found, key, value, f"{path}.{key}")
                except ApiError as error:
                    if not self._relax or error.param != f"{path}.{key}":
                        raise
                    self.dropped[key] = None
        self._arrays(schema, found)
        self._objects(schema, found, path)
        self._ranges(found)
        self._never(schema, found, path)
        return found

    def refuse(self, key: str, path: str, why: str = "cannot be enforced here; leave it out") -> None:
        """Raise, or leave the keyword out and list it in `dropped`."""
        if not self._relax:
            raise wrong(f"{path}.{key}", why)
        self.dropped[key] = None

    # -- keywords by kind of value

    def _schema(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Clean a keyword whose value is a schema."""
        if key == "items" and isinstance(value, list):  # the form of tuples before draft 2020
            found["prefixItems"] = [self.clean(item, f"{path}[{at}]") for at, item in enumerate(value)]
        else:
            found[key] = self.clean(value, path)

    def _schemas_in(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Clean a keyword whose value is a list of schemas."""
        if not isinstance(value, list) or not value:
            raise wrong(path, "must be a list of at least one schema")
        branches = [self.clean(item, f"{path}[{at}]") for at, item in enumerate(value)]
        if key != "oneOf":
            found[key] = found.get(key, []) + branches
            return
        if not are_apart(value, self._resolved):
            if not self._relax:
                raise wrong(path, "its branches must exclude each other, by type or by a required property's const")
            self.dropped[key] = None
        found["allOf"] = [*found.get("allOf", []), {"anyOf": branches}]

    def _named(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Clean a keyword whose value is an object of schemas."""
        if not isinstance(value, dict):
            raise wrong(path, "must be an object of schemas")
        as_written = self._expression if key == "patternProperties" else _same
        found[key] = {
            as_written(name, path): self.clean(item, f"{path}.{quoted(name)}") for name, item in value.items()
        }

    def _number(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check a bound of numbers, or multipleOf."""
        if isinstance(value, bool) and key.startswith("exclusive"):  # draft 4
            found[key] = value
        elif isinstance(value, bool) or not isinstance(value, int | float) or not are_exact(value):
            raise wrong(path, f"must be {EXACT}")
        elif key == "multipleOf" and (value <= 0 or int(value) != value):
            raise wrong(path, f"got {quoted(value)}; must be a positive integer")
        elif key == "multipleOf" and num_remainders(int(value)) > MOST_REMAINDERS:
            raise too_complex(path, f"without the zeros at its end it must be at most {MOST_REMAINDERS}")
        else:
            found[key] = int(value) if key == "multipleOf" else value

    def _count(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check a bound on the number of items, characters or properties."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**31:
            raise wrong(path, "must be a number from 0 on")
        if int(value) != value:
            raise wrong(path, "must be an integer")
        found[key] = int(value)

    def _type(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check a type, or a list of types."""
        names = value if isinstance(value, list) else [value]
        if not names or any(not isinstance(name, str) or name not in TYPES for name in names):
            raise wrong(path, f"got {quoted(value)}; must be of {', '.join(TYPES)}")
        found[key] = value

    def _required(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check a list of property names."""
        if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
            raise wrong(path, "must be a list of property names")
        found[key] = list(dict.fromkeys(value))

    def _values(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check const or enum."""
        if key == "enum" and (not isinstance(value, list) or not value):
            raise wrong(path, "must be a list of at least one value")
        if not are_exact(value):
            raise wrong(path, f"each number in it must be {EXACT}; larger ones fit in texts")
        found[key] = value

    def _pattern(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Rewrite the regular expression of a string."""
        if not isinstance(value, str):
            raise wrong(path, "must be a regular expression")
        found[key] = self._expression(value, path)

    def _expression(self, pattern: str, path: str) -> str:
        """A regular expression rewritten for the strings of JSON."""
        known = self._expressions.get(pattern)
        if known is not None:
            return known
        if why := check_pattern(pattern, self._limits):
            raise (too_complex if "at most" in why or "the most" in why else wrong)(path, why)
        written = json_pattern(pattern)
        if written is None:
            raise wrong(path, "classes of control characters, and classes in classes, are not supported")
        self._expressions[pattern] = written
        return written

    def _format(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Replace the format of a string or number by the rules that enforce it."""
        rules = format_rules(value)
        if rules is None:
            raise wrong(path, f"got {quoted(value)}; the formats that are enforced are {', '.join(ENFORCED)}")
        if value in FORMATS:
            found[key] = value
        if rules:
            found["allOf"] = [*found.get("allOf", []), *rules]

    def _ref(self, found: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Check a reference to a schema inside the document."""
        if not isinstance(value, str) or self._target(value) is None:
            raise wrong(path, f"got {quoted(value)}; must point to a schema of this document, as #/$defs/name")
        seen, target = {value}, self._target(value)
        while isinstance(target, dict) and isinstance(target.get("$ref"), str) and target["$ref"] not in self._ended:
            if target["$ref"] in seen:
                raise wrong(path, "points to itself and to nothing else")
            seen.add(target["$ref"])
            target = self._target(target["$ref"])
        self._ended |= seen
        found[key] = value

    def _target(self, ref: str) -> Any:
        """The schema that a reference names; None if there is none."""
        return self._schemas.get(unquote(ref)) if ref.startswith("#") else None

    # -- keywords that depend on each other

    def _arrays(self, schema: dict[str, Any], found: dict[str, Any]) -> None:
        """Turn additionalItems into `items` if the schema is a tuple."""
        rest = found.pop("additionalItems", None)
        if isinstance(schema.get("items"), list) and rest is not None:
            found["items"] = rest

    def _objects(self, schema: dict[str, Any], found: dict[str, Any], path: str) -> None:
        """Resolve the object keywords that depend on each other."""
        rest = found.pop("unevaluatedProperties", None)
        if rest not in (None, True, {}):
            keywords = ("anyOf", "allOf", "oneOf", "$ref", "if", "additionalProperties", "dependentSchemas")
            if any(name in schema for name in keywords):
                self.refuse("unevaluatedProperties", path)
            else:  # no other keyword here evaluates properties
                found["additionalProperties"] = rest
        if "propertyNames" in found:
            self._property_names(found, path)
        self._property_counts(found, path)

    def _property_counts(self, found: dict[str, Any], path: str) -> None:
        """Drop bounds implied by other keywords; the library enforces the rest only if all named properties
        are required.
        """
        named, needed = found.get("properties", {}), found.get("required", ())
        closed = found.get("additionalProperties") is False and not found.get("patternProperties")
        if found.get("minProperties", 0) <= len(needed):
            found.pop("minProperties", None)
        if closed and found.get("maxProperties", 0) >= len(named):
            found.pop("maxProperties", None)
        one_of_them = closed and not needed
        for key in ("minProperties", "maxProperties"):
            if key not in found or (one_of_them and found[key] == 1):
                continue
            if key == "minProperties" and found[key] > 1 and not closed:
                # The grammar counts a repeated name twice.
                self.refuse(key, path, "above 1 it needs additionalProperties: false, or as many required")
            elif named.keys() - {*needed}:
                self.refuse(key, path, "it can be enforced where all properties are required, or as 1 of a closed set")
            else:
                continue
            del found[key]

    def _property_names(self, found: dict[str, Any], path: str) -> None:
        """Rewrite propertyNames as properties or patternProperties, if they mean the same."""
        names = found.pop("propertyNames")
        if isinstance(names, dict) and names.keys() == {"$ref"}:  # an enum that other parts of the schema use too
            target = self._resolved(names)
            if _CLEAN.keys() & target <= {"type", "enum", "const", "pattern"}:
                names = self.clean(target, f"{path}.propertyNames")
        if names is True or names in ({}, {"type": "string"}):
            return
        if isinstance(names, dict) and "const" in names:
            names = {"enum": [names["const"]]} if names.keys() <= {"const", "type"} else names
        said = {*names} - {"type"} if isinstance(names, dict) else set()
        open_only, rest = not found.get("patternProperties"), found.get("additionalProperties", True)
        if open_only and said == {"enum"}:
            known = found.get("properties", {})
            taken = dict.fromkeys(name for name in names["enum"] if isinstance(name, str))
            found["properties"] = {name: known.get(name, rest) for name in taken}
            found["additionalProperties"] = False
        elif open_only and said == {"pattern"} and not found.get("properties"):
            found["patternProperties"] = {names["pattern"]: rest}
            found["additionalProperties"] = False
        else:
            self.refuse("propertyNames", path, "only an enum, or a pattern without properties, can be enforced")

    def _ranges(self, found: dict[str, Any]) -> None:
        """Rewrite draft 4's exclusive bounds, and adjust exclusive bounds of non-integers."""
        for bound, key in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(found.get(key), bool):
                exclusive = found.pop(key)
                if exclusive and bound in found:
                    found[key] = found.pop(bound)
            if key in found and found.get("type") != "integer":
                found[key] = inside(found[key], key == "exclusiveMinimum")

    def _never(self, schema: dict[str, Any], found: dict[str, Any], path: str) -> None:
        """Refuse the keywords that no grammar here enforces, unless they constrain nothing."""
        for key, empty in NEVER:
            if key not in schema or any(schema[key] == value for value in empty):
                continue
            idle = {
                "uniqueItems": found.get("maxItems", 2) <= 1,
                "maxContains": "contains" not in schema,
                "minContains": "contains" not in schema,
                "if": "then" not in schema and "else" not in schema,
                "then": "if" not in schema,
                "else": "if" not in schema,
            }
            if not idle.get(key, False):
                self.refuse(key, path)

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema at the end of a chain of $ref."""
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema if isinstance(schema, dict) else {}


_CLEAN: dict[str, Callable[[Cleaner, dict[str, Any], str, Any, str], None]] = {
    **dict.fromkeys(SCHEMA_OF, Cleaner._schema),
    **dict.fromkeys(SCHEMAS_OF, Cleaner._schemas_in),
    **dict.fromkeys(NAMED_OF, Cleaner._named),
    **dict.fromkeys(NUMBERS, Cleaner._number),
    **dict.fromkeys(COUNTS, Cleaner._count),
    **dict.fromkeys(("enum", "const"), Cleaner._values),
    "type": Cleaner._type,
    "required": Cleaner._required,
    "pattern": Cleaner._pattern,
    "format": Cleaner._format,
    "$ref": Cleaner._ref,
}


def _same(name: str, path: str) -> str:
    """The name unchanged."""
    return name
