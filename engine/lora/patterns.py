"""Patterns: the values that PEFT's rank_pattern and alpha_pattern give to modules.

A pattern is a regular expression for the end of a module's path; the first one that matches counts. A file may name
every module, thousands of them: names are found in a dict. Patterns with more than letters, digits and dots are matched
one after another, and all matches below a key share a limit of CPU time. Thread: one at a time. Source of the rule:
PEFT 0.21, `get_pattern_key`.
"""

from __future__ import annotations

import re
import time

from engine.base.errors import AdapterError
from engine.checkpoint.section import Section

MAX_PATTERNS, MAX_PATTERN = 8192, 256  # patterns of a key; characters of a pattern
MAX_REPEATS = 2  # unbounded quantifiers in a pattern, so that one match takes polynomial time
MAX_SECONDS = 5.0
QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
NAME = re.compile(r"[\w.]+", re.ASCII)  # its dots are taken as dots: paths of modules have no other separator


class Patterns:
    """The patterns below one key of an adapter's configuration."""

    def __init__(self, key: str, values: Section, whole: bool) -> None:
        """`values`: by pattern; `whole`: they are ranks. Raises AdapterError for too many patterns, and for one that is
        no expression or could take exponential time; ConfigError for a value that is no number."""
        if len(values.values) > MAX_PATTERNS:
            raise AdapterError(f"{key} has {len(values.values)} patterns; at most {MAX_PATTERNS} are read")
        self._key = key
        self._names: dict[str, tuple[int, float]] = {}  # a name's place in the file and its value
        self._expressions: list[tuple[int, float, re.Pattern[str]]] = []  # by place
        self._seconds = 0.0
        for place, text in enumerate(values.values):
            value = float(values.size(text)) if whole else values.number(text)
            if NAME.fullmatch(text):
                self._names[text] = (place, value)
            else:
                self._expressions.append((place, value, _compiled(key, text)))

    def value_of(self, module: str, default: float) -> float:
        """The value of the first pattern that matches a module's path, else `default`. Raises AdapterError once
        matching has taken MAX_SECONDS."""
        ends = [module]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        named = [self._names[end] for end in ends if end in self._names]
        place, value = min(named, default=(MAX_PATTERNS, default))
        for at, other, expression in self._expressions:
            if at > place:
                break
            if self._matches(expression, module):
                return other
        return value

    def _matches(self, expression: re.Pattern[str], module: str) -> bool:
        if self._seconds > MAX_SECONDS:
            raise AdapterError(f"{self._key} took more than {MAX_SECONDS:g} s to match; name the modules instead")
        begin = time.thread_time()
        matches = expression.match(module) is not None
        self._seconds += time.thread_time() - begin
        return matches


def _compiled(key: str, text: str) -> re.Pattern[str]:
    """PEFT's expression for a pattern."""
    short = ascii(text) if len(text) <= 80 else f"{text[:76]!a}..."
    repeats = text.count("*") + text.count("+") + text.count("{")
    if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or QUANTIFIED_GROUP.search(text):
        raise AdapterError(
            f"{key}: the pattern {short} must have at most {MAX_PATTERN} characters and {MAX_REPEATS} repetitions, "
            "none of a group; name the modules instead"
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError) as error:
        raise AdapterError(f"{key}: {short} is no regular expression ({error})") from None
