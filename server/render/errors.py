"""RenderError: the one exception that leaves this room.

Owner: none, a value; raised on the loop and in the pool. In: a cause found while making a prompt. Out: an HTTP status,
a stable reason, a text fit for clients and the path of the field at fault. The routes turn it into their error body.
"""

from __future__ import annotations

import json
from typing import Any

# bool stands before int, which it is a kind of
_KINDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list"}
_KINDS |= {dict: "an object"}
LONGEST = 200  # characters of an escaped value


class RenderError(Exception):
    """The prompt cannot be made from what the client sent."""

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
    """A client's text as an error may quote it: one line, cut short."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return repr(cut)


def escaped(value: Any) -> str:
    """A client's value, fit to stand in a text: as JSON has it, escaped, at most 200 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = text[: LONGEST + 1]
    whole = cut.encode("unicode_escape").decode("ascii")
    return whole if len(whole) <= LONGEST else whole[: LONGEST - 1] + "…"


def kind_of(value: Any) -> str:
    """What a field holds, in the words of the schema's own refusals; null and a missing field are nothing."""
    return _KINDS.get(type(value), "something else") if value is not None else "nothing"


def untyped(value: Any) -> str:
    """What stands where an object with a type belongs."""
    return "an object without a type" if isinstance(value, dict) else kind_of(value)
