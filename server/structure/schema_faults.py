"""Why a schema is refused: a keyword is wrong, or the schema exceeds a limit of the operator.

Owner: none, pure functions. In: a client's schema, the limits of the configuration. Out: an ApiError with the path of
the keyword; nothing if the schema is within its limits.
"""

from __future__ import annotations

from typing import Any

from server.errors import ApiError
from server.flags.config import LimitsConfig


def too_complex(path: str, text: str) -> ApiError:
    """400: the grammar would be too large."""
    return ApiError(400, "grammar_too_complex", f"{path}: {text}", path)


def wrong(path: str, text: str) -> ApiError:
    """400: the keyword at this path cannot be followed."""
    return ApiError(400, "grammar_invalid", f"{path}: {text}", path)


def measure(value: Any, path: str, limits: LimitsConfig) -> None:
    """Check the depth, number of values and enums of a schema against the limits, before anything else reads it."""
    nodes, stack = 0, [(value, 1)]
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if depth > limits.schema_max_depth:
            most = limits.schema_max_depth
            raise too_complex(path, f"nests deeper than {most} levels, the most that are allowed (--schema-max-depth)")
        if nodes > limits.schema_max_nodes:
            most = limits.schema_max_nodes
            raise too_complex(path, f"has more than {most} values, the most that are allowed (--schema-max-nodes)")
        if isinstance(value, dict):
            enum = value.get("enum")
            if isinstance(enum, list) and len(enum) > limits.schema_max_enum:
                most = limits.schema_max_enum
                raise too_complex(path, f"an enum has {len(enum)} entries; at most {most} (--schema-max-enum)")
            stack += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]
