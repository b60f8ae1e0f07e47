"""The anchors of a client's regular expression, which stand at the two ends of a whole text and say nothing there.

Owner: none, a pure function. In: an expression that a client has sent. Out: the same without `^` and `$` at its ends,
for a place where it is matched from end to end: the grammar of an answer, or the pattern of a custom tool's input.
"""

from __future__ import annotations


def unanchored(pattern: str) -> str:
    """An expression of a whole text without the anchors at its ends."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern
