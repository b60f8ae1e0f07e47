"""JSON and literals copied while they arrive: every model's notation becomes the same JSON text.

Owner: none, readers over a Source (output/source.py). In: one value as a model writes it: JSON, a Python literal, or
Gemma's strings between markers. Out: JSON text with `, ` and `: ` between values, characters instead of escapes,
numbers with their original spelling. Nothing is parsed into objects or validated. The readers only track brackets and
strings, so a value of any depth needs no stack, and a malformed value is passed on unchanged.
"""

from __future__ import annotations

import json
import re

import orjson

from server.output.source import Emit, Reader, Source, space

STRING_BREAK = re.compile(r'["\\\x00-\x1f]')
WORD_END = re.compile(r"[\s{}\[\]():,=\"'<]")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
HEX = {"x": 2, "u": 4, "U": 8}
CLOSING = {"}": "}", "]": "]", ")": "]"}
OPENING = {"{": "{", "[": "[", "(": "["}


def escaped(text: str) -> str:
    """A text as the inside of a JSON string; half a surrogate pair, which is no character, is left escaped."""
    made = json.dumps(text, ensure_ascii=False)[1:-1]
    try:
        made.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return made


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def copy_string(source: Source, emit: Emit) -> Reader[bool]:
    """Copy the rest of a JSON string after its first quote, including the last quote. False: the text ended inside."""
    while True:
        text, at = source.text, source.at
        found = STRING_BREAK.search(text, at)
        end = found.start() if found else len(text)
        if end > at:
            emit(text[at:end])
            source.at = end
        if found is None:
            if source.closed:
                return False
            yield
        elif found.group() == '"':
            emit('"')
            source.at = end + 1
            return True
        elif found.group() != "\\":
            emit(escaped(found.group()))  # a control character that the model did not escape
            source.at = end + 1
        else:
            size = _escape_size(text, end, source.closed and not source.cut)
            if not size:
                if source.cut:  # half a character
                    source.at = len(text)
                    return False
                yield
                continue
            emit(_escape(text[end : end + size]))
            source.at = end + size


def _escape_size(text: str, at: int, closed: bool) -> int:
    """Number of characters of the escape at `at`; 0 if it is still incomplete."""
    left = len(text) - at
    if left < 2:
        return left if closed else 0
    size = 6 if text[at + 1] == "u" else 2
    if size == 6 and text[at + 2 : at + 3] in "dD" and text[at + 3 : at + 4] in "89abAB":
        size = 12 if left < 8 or text[at + 6 : at + 8] == "\\u" else 6  # the second half of a surrogate pair
    if left < size:
        return left if closed else 0
    return size


def _escape(escape: str) -> str:
    """An escape replaced by its characters, escaped for JSON."""
    try:
        return escaped(orjson.loads(f'"{escape}"'))
    except orjson.JSONDecodeError:
        pass
    if len(escape) == 12:  # two halves that are no surrogate pair
        return _escape(escape[:6]) + _escape(escape[6:])
    if len(escape) == 6 and escape[1] == "u" and all(char in "0123456789abcdefABCDEF" for char in escape[2:]):
        return escape  # half a surrogate pair
    return escaped(escape)  # no valid escape: a backslash and a character


def read_string(source: Source) -> Reader[str | None]:
    """Read a JSON string whose first quote is next; returns its text, or None if it never ends."""
    source.at += 1
    parts: list[str] = []
    whole = yield from copy_string(source, parts.append)
    return string_of(parts) if whole else None


def string_of(parts: list[str]) -> str:
    """The text of a JSON string that copy_string has copied."""
    try:
        return str(orjson.loads('"' + "".join(parts)))
    except orjson.JSONDecodeError:  # half a surrogate pair
        return "".join(parts)[:-1]


def copy_json(source: Source, emit: Emit, stops: str = "") -> Reader[bool]:
    """Copy one JSON value. False: the text ended inside. A character of `stops` outside of strings also ends
    the value.
    """
    depth = 0
    while True:
        char = yield from space(source)
        if not char:
            return False
        if char in stops or (not depth and char in "}],:"):
            return True
        source.at += 1
        if char == '"':
            emit(char)
            if not (yield from copy_string(source, emit)):
                return False
        elif char in "{[":
            depth += 1
            emit(char)
        elif char in "}]":
            depth -= 1
            emit(char)
        elif char in ",:":
            emit(f"{char} ")
        else:
            emit(char)
            yield from _copy_word(source, emit, stops)
        if not depth:
            return True


def _copy_word(source: Source, emit: Emit, stops: str) -> Reader[None]:
    """Copy the rest of a number or of a literal."""
    while True:
        text, at, end = source.text, source.at, len(source.text)
        while at < end and text[at] not in ' \t\r\n{}[],:"' and text[at] not in stops:
            at += 1
        emit(text[source.at : at])
        source.at = at
        if at < end or source.closed:
            return
        yield


def copy_literal(source: Source, emit: Emit, quotes: tuple[str, ...] = ('"', "'")) -> Reader[bool]:
    """Copy one Python literal, or Gemma's notation if `quotes` is its marker. False: the text ended, or is no literal.

    Brackets hold values separated by commas; a bare word before a colon is a key.
    """
    stack: list[str] = []
    separate = ""  # separator before the next value
    while True:
        char = yield from space(source)
        if not char:
            return False
        if stack and char in CLOSING:
            source.at += 1
            emit(stack.pop())
            separate = ", "
        elif char in OPENING:
            source.at += 1
            emit(separate + OPENING[char])
            stack.append(CLOSING[{"{": "}", "[": "]", "(": ")"}[char]])
            separate = ""
            continue
        elif char == "," and stack:
            source.at += 1
            separate = ", "
            continue
        else:
            emit(separate)
            if not (yield from _scalar(source, emit, quotes, bool(stack))):
                return False
            separate = ", "
            if stack and stack[-1] == "}" and (yield from space(source)) == ":":
                source.at += 1
                emit(": ")
                separate = ""
                continue
        if not stack:
            return True


def _scalar(source: Source, emit: Emit, quotes: tuple[str, ...], inside: bool) -> Reader[bool]:
    """Copy a string, a number, True, False or None; a bare word becomes a string."""
    for quote in quotes:
        if (yield from _opens(source, quote)):
            return (yield from _copy_quoted(source, emit, quote))
    word = yield from _word(source)
    if not word or (source.cut and not source.pending):
        return False
    if word in WORDS and not (inside and (yield from space(source)) == ":"):
        emit(WORDS[word])
    elif inside and (yield from space(source)) == ":":
        emit(quoted(word))
    else:
        emit(number(word) or quoted(word))
    return True


def _opens(source: Source, quote: str) -> Reader[bool]:
    """Read a quote if it comes next; returns whether it did."""
    while True:
        text, at = source.text, source.at
        if text.startswith(quote, at):
            source.at = at + len(quote)
            return True
        if source.closed or not quote.startswith(text[at:]):
            return False
        yield


def _word(source: Source) -> Reader[str]:
    start: list[str] = []
    while True:
        text, at = source.text, source.at
        found = WORD_END.search(text, at)
        end = found.start() if found else len(text)
        start.append(text[at:end])
        source.at = end
        if found or source.closed:
            return "".join(start)
        yield


def number(word: str) -> str:
    """A Python number as JSON, with its own spelling if JSON allows it; "" for anything else."""
    plain = word.replace("_", "")
    try:
        value = orjson.loads(plain)
        return plain if type(value) in (int, float) else ""
    except orjson.JSONDecodeError:
        pass
    try:
        value = float(plain)
    except ValueError:
        return ""
    if plain[:1] not in "+-.0123456789" or value - value != 0:  # inf, nan
        return ""
    return json.dumps(int(plain)) if plain.lstrip("+-").isdecimal() and len(plain) < 100 else json.dumps(value)


def _copy_quoted(source: Source, emit: Emit, quote: str) -> Reader[bool]:
    """Copy the rest of a quoted string. Strings in markers have no escapes; Python's have, and may have triple
    quotes.
    """
    emit('"')
    python = quote in ('"', "'")
    if python and (yield from _opens(source, quote)):
        if not (yield from _opens(source, quote)):
            if source.cut and not source.pending:
                return False
            emit('"')  # an empty string
            return True
        quote *= 3
    while True:
        text, at = source.text, source.at
        end = text.find(quote, at)
        slash = text.find("\\", at, end if end >= 0 else len(text)) if python else -1
        stop = slash if slash >= 0 else end if end >= 0 else len(text)
        if stop == len(text) and (source.cut or not source.closed):
            stop -= next((size for size in range(len(quote) - 1, 0, -1) if text.endswith(quote[:size])), 0)
        if stop > at:
            emit(escaped(text[at:stop]))
            source.at = stop
        if slash >= 0:
            if not (yield from _copy_escape(source, emit)):
                return False
        elif end >= 0:
            source.at = end + len(quote)
            emit('"')
            return True
        elif source.closed:
            source.at = len(text)
            return False
        else:
            yield


def _copy_escape(source: Source, emit: Emit) -> Reader[bool]:
    """Copy a backslash in a Python string and the escape after it."""
    while len(source.text) - source.at < 2:
        if source.closed:
            if not source.cut:
                emit(escaped(source.text[source.at :]))
            source.at = len(source.text)
            return False
        yield
    char = source.text[source.at + 1]
    size = 2 + HEX.get(char, 0)
    while len(source.text) - source.at < size and not source.closed:
        yield
    escape = source.text[source.at : source.at + size]
    source.at += len(escape)
    if len(escape) < size and source.cut:
        return False
    if char in HEX:
        try:
            emit(escaped(chr(int(escape[2:], 16))))
            return True
        except (ValueError, OverflowError):
            pass
    emit(escaped(ESCAPES.get(char, char if char in "\\'\"" else escape)))
    return True
