"""Source: text that is still arriving, and the readers from which parsers are built.

Owner: loop, one Source per choice. In: text as it is detokenized. Out: the events of the parser that reads it. A parser
is a generator over a Source: it reads until the text runs out, yields, and is resumed when there is more; so a parser
is written as if the whole text were there. A reader holds back only text that may still become a marker, and reads each
character a bounded number of times.

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
    """Text that is not read yet begins at `at`. `closed`: no more text will come; `cut`: because a length
    limit cut the answer, so what is incomplete is dropped. `gated`: text of the answer that
    arrives together with the end of the reasoning is given back, see `begin_answer`.
    """

    __slots__ = ("_buffered", "answering", "at", "closed", "cut", "end_mark", "gated", "given_back", "text")

    def __init__(self, text: str = "", closed: bool = False) -> None:
        self.text = text
        self.at = 0
        self.closed = closed
        self.cut = False
        self.answering = True  # whether the newest text is of the answer, not of reasoning or of a header
        self.end_mark = ""  # the marker that ended the reasoning
        self.gated = False
        self.given_back = ""
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
        """Start to buffer the text that is read, including the last `back` characters."""
        self.text = self.text[self.at - back :]
        self.at = back
        self._buffered = []

    def take_buffered(self) -> str:
        """The buffered text; ends the buffering."""
        found = "".join(self._buffered or ()) + self.text[: self.at]
        self.release()
        return found

    def unread(self) -> None:
        """Read the buffered text again; ends the buffering."""
        self.text = self.take_buffered() + self.text

    def give_back(self) -> None:
        """Give the text that is not read yet back to the caller, who feeds it again."""
        self.given_back += self.text[self.at :]
        self.text = self.text[: self.at]

    def release(self) -> None:
        """End the buffering."""
        self.text = self.text[self.at :]
        self.at = 0
        self._buffered = None


class Finder:
    """Finds the first of several markers in a text, or a beginning of a marker at the end of the text.

    One regular expression of literals, so it needs no backtracking: any marker, or the beginning of one at the very
    end.
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
        """Whether the marker found at `at` may still become a longer one."""
        return len(text) - at < self.longest and text[at:] in self.prefixes


@lru_cache(maxsize=512)
def finder(markers: tuple[str, ...]) -> Finder:
    """A cached Finder, shared by all choices."""
    return Finder(markers)


def ignore(text: str) -> None:
    """Drop a text."""


# -- readers


def peek(source: Source) -> Reader[str]:
    """The next character, without reading it; "" at the end."""
    while source.at == len(source.text):
        if source.closed:
            return ""
        yield
    return source.text[source.at]


def space(source: Source) -> Reader[str]:
    """Skip white space; returns the next character without reading it."""
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
    """Read the literal that comes next, out of several; "" if none comes next."""
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
    """Emit text up to the first marker, read this marker and return it; "" at the end of the text."""
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
                if not source.cut or len(text) - end < 2:  # one character is hardly a marker
                    emit(text[end:])
                source.at = len(text)
                return ""
        elif source.closed:
            return ""
        yield


def newlines(source: Source, most: int) -> Reader[None]:
    """Skip up to `most` newlines."""
    while most and (yield from peek(source)) == "\n":
        source.at += 1
        most -= 1


def drop_cut(source: Source) -> None:
    """Drop the rest of an answer that was cut off inside the name of an argument."""
    if source.closed:
        source.at = len(source.text)


def fits_tool(name: str) -> bool:
    """Whether this may be the name of a tool: it has no white space, bracket or quote."""
    return not any(char in '<>{}[]()"' or char.isspace() for char in name)


def fits_key(name: str) -> bool:
    """Whether this may be the name of a parameter inside a tag, such as `filter[status]` and `unit price`."""
    return not any(char in "<>\n" for char in name)


def name_before(
    source: Source, markers: tuple[str, ...], fits: Callable[[str], bool] = fits_tool
) -> Reader[tuple[str, str]]:
    """Read (a name, the marker after it); ("", "") if no short name that `fits` precedes a marker."""
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
