"""Reference for json_scan.scan in plain Python, one character at a time: slow and obvious."""

from __future__ import annotations

import re

from _fast import json_scan as codes

_NUMBER = re.compile(rb"-?[0-9]*(?:[.eE+\-0-9])*")
_ESCAPE = re.compile(rb"\\u([0-9a-fA-F]{4})")


def scan(data: bytes, max_depth: int, max_nodes: int) -> int:
    """The result code of json_scan.scan."""
    depth, nodes, at = 0, 1, 0
    while at < len(data):
        char = data[at : at + 1]
        if char == b'"':
            end = at + 1
            while end < len(data) and data[end : end + 1] != b'"':
                end += 2 if data[end : end + 1] == b"\\" else 1
            if has_lone_surrogate(data[at + 1 : end]):
                return codes.LONE_SURROGATE
            at = end + 1
            continue
        if char in b"-0123456789":
            text = _NUMBER.match(data, at).group()
            if data[at : at + 2] == b"-I" or (
                data[at + len(text) : at + len(text) + 1] == b"I" and text.lstrip(b"-").isdigit()
            ):
                return codes.NOT_FINITE
            if text.lstrip(b"-").isdigit() and text.count(b"-") < 2 and not -(2**63) <= int(text) < 2**64:
                return codes.INTEGER_TOO_LARGE
            at += len(text)
            continue
        nodes += char in b"{[,"
        depth += (char in b"{[") - (char in b"}]")
        if nodes > max_nodes:
            return codes.TOO_MANY_NODES
        if depth > max_depth:
            return codes.TOO_DEEP
        if char in b"NI":
            return codes.NOT_FINITE
        at += 1
    return codes.OK


def has_lone_surrogate(text: bytes) -> bool:
    at = 0
    while at < len(text):
        if text[at : at + 1] != b"\\":
            at += 1
            continue
        found = _ESCAPE.match(text, at)
        unit = int(found.group(1), 16) if found else 0
        if not 0xD800 <= unit <= 0xDFFF:
            at += 6 if found else 2
            continue
        low = _ESCAPE.match(text, at + 6)
        if unit >= 0xDC00 or low is None or not 0xDC00 <= int(low.group(1), 16) <= 0xDFFF:
            return True
        at += 12
    return False
