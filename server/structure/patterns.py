"""Clients' regular expressions: which are accepted, and how to rewrite one for strings in JSON.

Owner: none, pure functions. Python's `re` never runs a client's expression: these functions read its text once, from
left to right. The grammar library matches it in linear time.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from server.flags.config import LimitsConfig
from server.render.anchors import unanchored

_PIECES = re.compile(
    r"\\(?P<back>[1-9]|k<)|\\(?P<edge>[bB])|\\(?P<control>[pP]\{\^?C)|\\.|\[(?P<negated>\^?)(?P<inside>\]?(?:[^\]\\]|\\.)*)\]"
    r"|\(\?(?P<look><?[=!])|\{(?P<low>\d+)(?:,(?P<high>\d*))?\}",
    re.DOTALL,
)
# One character or escape inside a character class; two of them are the ends of a range.
_ITEM = re.compile(
    r"\\x\{(?P<wide>[0-9a-fA-F]{1,6})\}|\\(?:x(?P<two>[0-9a-fA-F]{2})|u(?P<four>[0-9a-fA-F]{4}))"
    r"|\\(?P<escape>.)|(?P<char>.)",
    re.DOTALL,
)
# The text allowed in a pattern for the space between JSON values: JSON's white space, groups, classes and counts.
_SPACES = re.compile(r"\(\?:|\{\d+(?:,\d*)?\}|\[(?:[ \t\n\r]|\\[nrts])+\]|\\[nrts]|[ \t\n\r*+?()|]")
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_TURNED = re.compile(r"\\[DSWpP]")  # named classes that may contain a quote or a backslash
_CONTROL_CLASS = re.compile(r"\\[pP]\{\^?C")
_QUOTES = (ord('"'), ord("\\"))
CONTROLS = r"\x00-\x1f"


def check_pattern(pattern: str, limits: LimitsConfig) -> str:
    """Why a regular expression is refused; "" if no reason is known."""
    most = limits.regex_max_bytes
    if len(pattern) > most or len(pattern.encode()) > most:
        return f"has more than {limits.regex_max_bytes} bytes, the most that are allowed (--regex-max-bytes)"
    for found in _PIECES.finditer(pattern):
        if found["look"]:
            return "look-around is not supported"
        if found["back"]:
            return "back references are not supported"
        if found["edge"]:
            return "word boundaries are not supported"
        counts = [int(found[name][:9]) for name in ("low", "high") if found[name]]
        if counts and max(counts) > limits.regex_max_repeat:
            return f"repeats {max(counts)} times; at most {limits.regex_max_repeat} are allowed (--regex-max-repeat)"
    return _reading(pattern)


@lru_cache(maxsize=1024)
def _reading(pattern: str) -> str:
    """Why the grammar library cannot read an expression, "" if it can; takes about 0.1 ms."""
    import llguidance

    text = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern}}]})
    reason = llguidance.LLMatcher.validate_grammar(text)
    if "parse error" in reason:
        return "is not a well-formed regular expression; check its brackets, counts and escapes"
    return "^ and $ can stand at the two ends only" if "lookaround" in reason else ""


def expression(pattern: str) -> str:
    """A regular expression as Lark writes it; it must match the whole text."""
    import llguidance

    return f"/{llguidance.regex_to_lark(unanchored(pattern))}/"


def space_pattern(pattern: str, limits: LimitsConfig) -> tuple[str, str]:
    """(expression for the space between JSON values, why it is refused or "")"""
    if why := check_pattern(pattern, limits):
        return "", why
    if _SPACES.sub("", pattern):
        return (
            "",
            "must match white space of JSON alone: write it with spaces, \\n, \\r, \\t, \\s, [ ], ( ), | and counts",
        )
    return pattern.replace(r"\s", r"[ \t\n\r]"), ""


def json_pattern(pattern: str) -> str | None:
    """Rewrite the expression for the text of JSON strings, which escapes quotes, backslashes and controls.

    In the library, a class with all control characters also matches `\\"` and `\\\\`, so a class that excludes a quote
    or a backslash must exclude control characters too. None if a class cannot be rewritten so.
    """
    done, end = [], 0
    for found in _PIECES.finditer(pattern):
        if found["control"]:
            return None
        inside = found["inside"]
        if inside is None:
            continue
        ranges = _ranges(inside)
        if ranges is None or _CONTROL_CLASS.search(inside):
            return None
        if found["negated"]:
            if _TURNED.search(inside) or any(low <= code <= high for low, high in ranges for code in _QUOTES):
                done.append(f"{pattern[end : found.end() - 1]}{CONTROLS}]")
                end = found.end()
        elif any(low < 8 for low, _ in ranges):
            return None
    return "".join(done) + pattern[end:]


def _ranges(inside: str) -> list[tuple[int, int]] | None:
    """The character ranges of a class, without its named classes; None if classes are nested."""
    if "&&" in inside:
        return None
    items: list[int | None] = []  # None for a named class
    dashes = []
    for found in _ITEM.finditer(inside):
        number, escape, char = found["wide"] or found["two"] or found["four"], found["escape"], found["char"]
        if number:
            items.append(int(number, 16))
        elif escape and escape in "dwsDWSpP":
            items.append(None)
        elif char == "[" or (escape and escape.isalnum() and escape not in _NAMED):
            return None
        else:
            if char == "-":
                dashes.append(len(items))
            items.append(ord(_NAMED.get(escape, escape) if escape else char))
    found_ranges = [(code, code) for code in items if code is not None]
    for dash in dashes:
        if 0 < dash < len(items) - 1:
            low, high = items[dash - 1], items[dash + 1]
            if low is not None and high is not None:
                found_ranges.append((low, high))
    return found_ranges


def searched(pattern: str) -> str | None:
    """A schema's pattern, which may match anywhere, as an expression for the whole text; None if there is none."""
    import llguidance

    depth, inside, at, top = 0, False, 0, False
    anchors: list[int] = []
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            top = True
        elif char in "^$":
            anchors.append(at)
        at += 1
    begins, ends = 0 in anchors, len(pattern) - 1 in anchors and pattern.endswith("$")
    if len(anchors) != begins + ends or (anchors and top):
        return None
    body = pattern[begins : len(pattern) - ends]
    whole = f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"
    return f"/{llguidance.regex_to_lark(whole)}/"
