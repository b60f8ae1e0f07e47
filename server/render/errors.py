"""RenderError: the only exception that leaves server/render.

Owner: none, a value; raised on the loop and in the pool. In: a cause found while making a prompt. Out: an HTTP status,
a stable reason, a text for clients and the path of the field at fault. The routes turn it into their error body.
"""

from __future__ import annotations

import json
from typing import Any

# bool is listed separately, since it is a subclass of int
_KINDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list"}
_KINDS |= {dict: "an object"}
LONGEST = 200  # characters of an escaped value


class RenderError(Exception):
    """The prompt cannot be made from the client's request."""

    def __init__(self, status: int, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.param = param


def invalid(message: str, param: str | None = None) -> RenderError:
    """A field has the wrong shape or value."""
    return RenderError(400, "invalid_parameter", message, param)


def quoted(text: str, limit: int = 80) -> str:
    """A client's text for an error: quoted, on one line, truncated."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return repr(cut)


def escaped(value: Any) -> str:
    """A client's value for a text: as JSON, escaped, at most 200 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = text[: LONGEST + 1]
    whole = cut.encode("unicode_escape").decode("ascii")
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 1] + "…"


def kind_of(value: Any) -> str:
    """The kind of a field's value, in the words of the schema's errors; "nothing" for null and missing fields."""
    return _KINDS.get(type(value), "something else") if value is not None else "nothing"


def untyped(value: Any) -> str:
    """The kind of a value that should be an object with a type."""
    return "an object without a type" if isinstance(value, dict) else kind_of(value)
