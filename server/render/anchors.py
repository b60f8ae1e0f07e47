"""Removes the anchors at the ends of a client's regular expression, which have no effect when a whole text is matched.

Owner: none, a pure function. In: an expression that a client has sent. Out: the same without `^` and `$` at its ends,
for uses that always match a whole text: the grammar of an answer, or the pattern of a custom tool's input.
"""

from __future__ import annotations


def unanchored(pattern: str) -> str:
    """A regular expression for a whole text, without the anchors at its ends."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern
