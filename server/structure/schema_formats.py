"""What a schema's `format` asks for: formats that the grammar library knows, and formats rewritten into other keywords.

Owner: none, pure values and one function; called in the pool. The library knows how many days a month has, but no leap
years. The formats of numbers are those of OpenAPI, which generators of schemas write next to `"type": "integer"`; the
range of 64 bits is more than the library holds (server/structure/exact_numbers.py).
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
OTHERS = ("null", "boolean", "object", "array", "string")  # of which a format of numbers says nothing
FREE = ("float", "double", "password", "binary")  # every number, every string
# Days that there are.
DAYS = (
    r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|[0-9]{4}-(?:0[13-9]|1[0-2])-(?:29|30)"
    r"|[0-9]{4}-(?:0[13578]|1[02])-31"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)


def format_rules(name: Any) -> tuple[dict[str, Any], ...] | None:
    """Schemas that a value must match in addition to the format itself; None where nothing here enforces the format."""
    if not isinstance(name, str):
        return None
    if name in RANGES:
        least, most = RANGES[name]
        return ({"type": [*OTHERS, "integer"], "minimum": least, "maximum": most},)
    if name in ("date", "date-time"):
        end = "$" if name == "date" else "[Tt]"
        return {"pattern": f"^(?:{DAYS}){end}"}, {"pattern": "^0{0,3}[1-9]"}
    return () if name in FORMATS or name in FREE else None
