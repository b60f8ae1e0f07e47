"""completed: what is left of JSON arguments that a length has cut.

Owner: none, a pure function. In: the text of an object, whole or its beginning. Out: a dict: all members that had
ended, and of the last one what makes sense of it. Anthropic's `input` is an object even where the model was cut short.
"""

from __future__ import annotations

from typing import Any

import orjson


def completed(text: str) -> dict[str, Any]:
    """The object; {} where nothing of it makes sense."""
    cuts = [len(text), *_cuts(text)[-8:][::-1]]
    for cut in cuts:
        try:
            found = orjson.loads(text[:cut] + _tail(text[:cut]))
        except orjson.JSONDecodeError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _tail(text: str) -> str:
    """What closes all that is open at the end of a text."""
    stack, inside = _walk(text, [])
    return ('"' if inside else "") + "".join(reversed(stack))


def _cuts(text: str) -> list[int]:
    """Where members end: at the commas and behind the brackets that open."""
    cuts: list[int] = []
    _walk(text, cuts)
    return cuts


def _walk(text: str, cuts: list[int]) -> tuple[list[str], bool]:
    """(what closes the open brackets, whether the text ends in a string)."""
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
