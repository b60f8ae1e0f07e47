"""The keywords of JSON Schema grouped by the kind of their values, and the schemas nested in a schema.

Owner: none, tables and a pure function. In: a schema. Out: each schema in it with its JSON pointer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SCHEMA_OF = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedProperties")
SCHEMAS_OF = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED_OF = ("properties", "patternProperties", "$defs", "definitions")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")


def subschemas(root: Any) -> Iterator[tuple[str, Any]]:
    """Every schema in a schema that $ref may name, as (JSON pointer, schema); the root's pointer is `#`."""
    stack = [("#", root)]
    while stack:
        pointer, schema = stack.pop()
        if not isinstance(schema, dict | bool):
            continue
        yield pointer, schema
        for key, value in schema.items() if isinstance(schema, dict) else ():
            if key in SCHEMA_OF and not isinstance(value, list):
                stack.append((f"{pointer}/{key}", value))
            elif (key in SCHEMAS_OF or key == "items") and isinstance(value, list):
                stack += [(f"{pointer}/{key}/{at}", item) for at, item in enumerate(value)]
            elif key in NAMED_OF and isinstance(value, dict):
                names = ((name.replace("~", "~0").replace("/", "~1"), item) for name, item in value.items())
                stack += [(f"{pointer}/{key}/{name}", item) for name, item in names]
