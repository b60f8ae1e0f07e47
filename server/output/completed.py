"""completed: the complete part of JSON arguments that were truncated by a length limit.

Owner: none, a pure function. In: the text of an object, whole or truncated. Out: a dict with all complete members, and
the last member as far as it can be read. Anthropic's `input` must be an object even if the model was cut off.
"""

from __future__ import annotations

from typing import Any

import orjson


def completed(text: str) -> dict[str, Any]:
    """The object; {} if nothing can be read."""
    cuts = [len(text), *_cuts(text)[-8:][::-1]]
    for cut in cuts:
        try:
            found = orjson.loads(text[:cut] + _tail(text[:cut]))
        except orjson.JSONDecodeError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _tail(text: str) -> str:
    """The quotes and brackets that close everything open at the end of a text."""
    stack, inside = _walk(text, [])
    return ('"' if inside else "") + "".join(reversed(stack))


def _cuts(text: str) -> list[int]:
    """Places where members end: at commas and after opening brackets."""
    cuts: list[int] = []
    _walk(text, cuts)
    return cuts


def _walk(text: str, cuts: list[int]) -> tuple[list[str], bool]:
    """(closing brackets of the open ones, whether the text ends inside a string)."""
    stack: list[str] = []
    inside = escaped = False
    for at, char in enumerate(text):
        if inside:
            inside = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            inside = True
        elif char in "{[":
            stack.append("}" if char == "{" else "]")
            cuts.append(at + 1)
        elif char in "}]" and stack:
            stack.pop()
        elif char == ",":
            cuts.append(at)
    return stack, inside
