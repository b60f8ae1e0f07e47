"""A schema's `format`: those that the grammar library knows, and those rewritten into other keywords.

Owner: none, pure values and one function; called in the pool. The library knows how many days a month has, but no leap
years. The number formats are those of OpenAPI, which schema generators write next to `"type": "integer"`; the range of
64 bits exceeds the numbers that the library represents exactly (server/structure/exact_numbers.py).
"""

from __future__ import annotations

from typing import Any

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
RANGES = {
    f"{sign}int{bits}": (0 if sign else -(1 << bits - 1), (1 << bits - (not sign)) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32)
}
ENFORCED = (*FORMATS, *RANGES)
OTHERS = ("null", "boolean", "object", "array", "string")  # types that a number format does not restrict
FREE = ("float", "double", "password", "binary")  # formats that allow every number, or every string
# Dates that exist.
DAYS = (
    r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|[0-9]{4}-(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|[0-9]{4}-(?:0[13578]|1[02])-31"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)


def format_rules(name: Any) -> tuple[dict[str, Any], ...] | None:
    """Schemas that a value must also match besides the format itself; None if the format cannot be enforced."""
    if not isinstance(name, str):
        return None
    if name in RANGES:
        least, most = RANGES[name]
        return ({"type": [*OTHERS, "integer"], "minimum": least, "maximum": most},)
    if name in ("date", "date-time"):
        end = "$" if name == "date" else "[Tt]"
        return {"pattern": f"^(?:{DAYS}){end}"}, {"pattern": "^0{0,3}[1-9]"}
    return () if name in FORMATS or name in FREE else None
