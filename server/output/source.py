"""Source: text that is still arriving, and the readers that parsers are made of.

Owner: loop, one Source per choice. In: text as it is detokenized. Out: whatever the parser above makes of it. A parser
is a generator over a Source: it reads on until the text runs out, yields, and is resumed when there is more; so a
parser is written as if the whole text were there. A reader holds back only what may still become a marker, and looks at
each character a bounded number of times.

    feed(text) -> generator goes on: until(marker), accept(literal), space() ... -> starved: yield
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from server.render.tools import LONGEST_NAME

T = TypeVar("T")
Reader = Generator[None, None, T]  # yields when it needs more text, returns what it has read
Emit = Callable[[str], None]

SPACE = " \t\r\n"


class Source:
    """Text not read yet, from `at` on. `closed`: no more will come."""

    __slots__ = ("_buffered", "at", "closed", "text")

    def __init__(self, text: str = "", closed: bool = False) -> None:
        self.text = text
        self.at = 0
        self.closed = closed
        self._buffered: list[str] | None = None

    def feed(self, text: str) -> None:
        if self._buffered is not None:
            self._buffered.append(self.text[: self.at])
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    @property
    def pending(self) -> bool:
        """Whether a reader holds text back."""
        return self.at < len(self.text)

    def keep(self, back: int = 0) -> None:
        """Starts to buffer the text that is read; the last `back` characters are buffered too."""
        self.text = self.text[self.at - back :]
        self.at = back
        self._buffered = []

    def take_buffered(self) -> str:
        """The buffered text; ends the buffering."""
        found = "".join(self._buffered or ()) + self.text[: self.at]
        self.release()
        return found

    def release(self) -> None:
        """Ends the buffering."""
        self.text = self.text[self.at :]
        self.at = 0
        self._buffered = None


class Finder:
    """The first of several markers in a text, or the end of the text that may become a marker.

    One expression of literals, so there is nothing to backtrack: any marker, or the beginning of one at the very end.
    """

    __slots__ = ("longest", "prefixes", "search")

    def __init__(self, markers: tuple[str, ...]) -> None:
        ordered = sorted(set(markers) - {""}, key=len, reverse=True)
        self.prefixes = frozenset(marker[:size] for marker in ordered for size in range(1, len(marker)))
        self.longest = max((len(marker) for marker in ordered), default=0)
        whole = "|".join(map(re.escape, ordered)) or r"(?!)"
        begun = "|".join(map(re.escape, sorted(self.prefixes, key=len, reverse=True))) or r"(?!)"
        self.search = re.compile(rf"({whole})|(?:{begun})\Z").search

    def may_grow(self, text: str, at: int) -> bool:
        """Whether what stands at `at`, a marker already, may still become a longer one."""
        return len(text) - at < self.longest and text[at:] in self.prefixes


@lru_cache(maxsize=512)
def finder(markers: tuple[str, ...]) -> Finder:
    """A Finder, made once for all choices."""
    return Finder(markers)


def ignore(text: str) -> None:
    """Drops a text."""


# -- readers


def peek(source: Source) -> Reader[str]:
    """The next character, not read; "" at the end."""
    while source.at == len(source.text):
        if source.closed:
            return ""
        yield
    return source.text[source.at]


def space(source: Source) -> Reader[str]:
    """Skips white space; the next character, not read."""
    while True:
        text, at, end = source.text, source.at, len(source.text)
        while at < end and text[at] in SPACE:
            at += 1
        source.at = at
        if at < end:
            return text[at]
        if source.closed:
            return ""
        yield


def accept(source: Source, *literals: str) -> Reader[str]:
    """The first of the literals that comes next, read; "" if none does."""
    while True:
        text, at = source.text, source.at
        waiting = False
        for literal in filter(None, literals):
            if text.startswith(literal, at):
                source.at = at + len(literal)
                return literal
            left = len(text) - at
            if not source.closed and left < len(literal) and literal.startswith(text[at:]):
                waiting = True
                break
        if not waiting:
            return ""
        yield


def until(source: Source, markers: tuple[str, ...], emit: Emit) -> Reader[str]:
    """Emits text up to the first marker, which is read and returned; "" at the end of the text."""
    find = finder(markers)
    search = find.search
    while True:
        text, at = source.text, source.at
        found = search(text, at)
        end = len(text) if found is None else found.start()
        if end > at:
            emit(text[at:end])
            source.at = end
        if found is not None:
            marker = found.group(1)
            if marker is not None and (source.closed or not find.may_grow(text, end)):
                source.at = found.end()
                return marker
            if source.closed:
                emit(text[end:])
                source.at = len(text)
                return ""
        elif source.closed:
            return ""
        yield


def newlines(source: Source, most: int) -> Reader[None]:
    """Skips up to `most` line ends."""
    while most and (yield from peek(source)) == "\n":
        source.at += 1
        most -= 1


def drop_cut(source: Source) -> None:
    """The rest of an answer that was cut inside the name of an argument is no text."""
    if source.closed:
        source.at = len(source.text)


def fits_tool(name: str) -> bool:
    """Whether this may be the name of a tool: nothing in it is white space, a bracket or a quote."""
    return not any(char in '<>{}[]()"' or char.isspace() for char in name)


def fits_key(name: str) -> bool:
    """Whether this may be the name of a parameter inside a tag: `filter[status]` and `unit price` may."""
    return not any(char in "<>\n" for char in name)


def name_before(
    source: Source, markers: tuple[str, ...], fits: Callable[[str], bool] = fits_tool
) -> Reader[tuple[str, str]]:
    """(a name, the marker behind it, read); ("", "") where no short name that `fits` stands in front of a marker."""
    find = finder(markers)
    while True:
        text, at = source.text, source.at
        found = find.search(text, at, at + LONGEST_NAME + 64)
        whole = found is not None and found.group(1) is not None
        name = text[at : len(text) if found is None else found.start()].strip()
        if not whole and not source.closed and len(name) <= LONGEST_NAME and fits(name):
            yield
            continue
        if found is None or not whole or not name or len(name) > LONGEST_NAME or not fits(name):
            return "", ""
        source.at = found.end()
        return name, found.group()
