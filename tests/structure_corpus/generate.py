"""Random JSON Schemas by seed: every enforced keyword, in the combinations that the draws make."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    "^[a-z]{2,4}$", r"^\d{3}-\d{4}$", "foo|bar", "[A-Z]", "^(a|b)*c$", r"^\w+@\w+$", "^.{3}$", r"\.",
    r"^\$\d+(\.\d{2})?$", '^[^"]*$', r"^\s?x",
)  # fmt: skip
VALUES = ("a", "b", 'q"\\', 1, 2.5, None, True, {"a": 1}, [1, "x"], "é\n", "")
CONSTS = ("x", 3, -1.5, None, False, {"k": [1, 2]}, [[]], "<tag/>")
NAMES = ("a", "b", "c", "x", "xy", "kind", "na me", 'q"', "a/b", "é")
LEAVES = ("string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern")
NESTED = (*LEAVES, "object", "array", "tuple", "map", "anyOf", "oneOf", "allOf", "ref", "any", "types")


def schema(seed: int) -> dict[str, Any]:
    """The schema of a seed; about a third of them have definitions that refer to each other."""
    draw = Draw(seed)
    if draw.random() >= 0.3:
        made = draw.schema(0, ())
        return made if isinstance(made, dict) else {}
    made = draw.schema(1, ("n", "m"))
    return {**(made if isinstance(made, dict) else {}), "$defs": {name: draw.schema(1, ("n", "m")) for name in "nm"}}


class Draw(random.Random):
    """Draws schemas."""

    def schema(self, depth: int, names: tuple[str, ...]) -> Any:
        kind = self.choice(NESTED if depth < 3 else LEAVES)
        if kind in ("boolean", "null"):
            return {"type": kind}
        if kind in ("integer", "number"):
            return self.number(kind)
        if kind in ("anyOf", "oneOf", "allOf"):
            return {kind: [self.schema(depth + 1, names) for _ in range(self.randrange(1, 4))]}
        if kind == "ref":
            return {"$ref": f"#/$defs/{self.choice(names)}"} if names else {"const": None}
        return getattr(self, f"of_{kind}")(depth, names)

    def number(self, kind: str) -> dict[str, Any]:
        low = self.choice([None, -1000, -5, 0, 1, 7, *([0.5, -2.25] if kind == "number" else [])])
        found: dict[str, Any] = {"type": kind}
        if low is not None:
            found[self.choice(["minimum", "exclusiveMinimum"])] = low
        if self.random() < 0.5:
            found[self.choice(["maximum", "exclusiveMaximum"])] = (low or 0) + self.choice([2, 3, 10, 1000, 123456])
        if self.random() < 0.2:
            found["multipleOf"] = self.choice([1, 2, 3, 5, 10])
        return found

    def of_string(self, depth: int, names: tuple[str, ...]) -> Any:
        least = self.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self.randrange(6)}

    def of_enum(self, depth: int, names: tuple[str, ...]) -> Any:
        return {"enum": self.sample(VALUES, self.randrange(1, 5))}

    def of_const(self, depth: int, names: tuple[str, ...]) -> Any:
        return {"const": self.choice(CONSTS)}

    def of_format(self, depth: int, names: tuple[str, ...]) -> Any:
        return {"type": "string", "format": self.choice(FORMATS)}

    def of_pattern(self, depth: int, names: tuple[str, ...]) -> Any:
        return {"type": "string", "pattern": self.choice(PATTERNS)}

    def of_any(self, depth: int, names: tuple[str, ...]) -> Any:
        return self.choice([{}, True, {"description": "d"}])

    def of_types(self, depth: int, names: tuple[str, ...]) -> Any:
        types = self.sample(["string", "integer", "null", "boolean", "array", "object"], 2)
        return {"type": types, "maxLength": 4, "maxItems": 2, "minimum": 3}

    def of_array(self, depth: int, names: tuple[str, ...]) -> Any:
        least = self.randrange(3)
        bounds = {"minItems": least, "maxItems": least + self.randrange(4)}
        return {"type": "array", "items": self.schema(depth + 1, names), **bounds}

    def of_tuple(self, depth: int, names: tuple[str, ...]) -> Any:
        items = [self.schema(depth + 1, names) for _ in range(self.randrange(1, 4))]
        rest, least = self.choice([False, {"type": "integer"}, True]), self.randrange(4)
        return {"type": "array", "prefixItems": items, "items": rest, "minItems": least, "maxItems": least + 2}

    def of_map(self, depth: int, names: tuple[str, ...]) -> Any:
        found: dict[str, Any] = {"type": "object", "maxProperties": self.randrange(1, 4)}
        if self.random() < 0.5:
            found["additionalProperties"] = self.schema(depth + 1, names)
        if self.random() < 0.4:
            found["patternProperties"] = {self.choice(["^x", "y$", "^[a-c]+$"]): self.schema(depth + 1, names)}
        if self.random() < 0.3:
            keys = {"pattern": "^[a-z]{1,3}$"}, {"enum": ["k", "l"]}, {"type": "string"}
            found["propertyNames"] = self.choice(keys)
        if self.random() < 0.3:
            found["minProperties"] = self.randrange(3)
        return found

    def of_object(self, depth: int, names: tuple[str, ...]) -> Any:
        keys = self.sample(NAMES, self.randrange(1, 5))
        found: dict[str, Any] = {"type": "object", "properties": {key: self.schema(depth + 1, names) for key in keys}}
        found["required"] = self.sample(keys, self.randrange(len(keys) + 1))
        if self.random() < 0.6:
            others = False, False, {"type": "integer"}, {"type": "string", "maxLength": 3}, True
            found["additionalProperties"] = self.choice(others)
        if self.random() < 0.15:
            found["patternProperties"] = {self.choice(["^x", "y$"]): self.schema(depth + 1, names)}
        if self.random() < 0.1:
            found[self.choice(["minProperties", "maxProperties"])] = self.randrange(1, 4)
        return found
