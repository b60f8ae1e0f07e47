"""Foreign fields of a body: translated into ours, refused, or named to the client and in the log.

Owner: loop, or the pool for large bodies; values. In: the names and values of a body or of its nested options, and the
names of our fields. Out: a Translation. Two names of one thing in one body are refused unless their values are equal.
A dialect that decodes its own options calls `translated` with them, and `report` with what it ignored.

    body -> json_scan: names -> all known: nothing to do
                             -> others: Members -> translated -> the body with our fields at its end -> decoder
"""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from _fast import json_scan
from server.errors import invalid, quoted
from server.foreign_fields import FIELDS, HINTS, OF_CHAT, SPELLINGS, Honoured, Refused
from server.render.errors import kind_of
from server.schema.generate import GenerateBody, TokenSampling
from server.schema.messages import CountBody, MessagesBody
from server.schema.responses import InputBody, ResponsesBody

if TYPE_CHECKING:
    from server.http.exchange import Exchange

log = logging.getLogger("omniloop")

HEADER = b"x-ignored-fields"
MOST_NAMED, NAME_LENGTH = 8, 64  # names in the header, and characters of each
MOST_LINES = 60  # names that the log has in a minute
MOST_VALUES = 1 << 16  # values that a decoder makes in one call, during which it holds the GIL for up to 10 ms
# Bodies whose routes count tokens: clients send them the fields of the whole request.
COUNTED: dict[type, type[msgspec.Struct]] = {CountBody: MessagesBody, InputBody: ResponsesBody}
NESTED: dict[type, tuple[str, type[msgspec.Struct]]] = {GenerateBody: ("sampling_params", TokenSampling)}
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]|,")
_WHITE = b" \t\r\n"


class Translation(NamedTuple):
    """What the foreign fields of one object mean."""

    settings: dict[str, Any]  # our fields; an object holds the client's own members too
    ignored: list[str]  # the client's names, with a prefix if nested
    renamed: dict[str, str]  # path of our field -> the client's name


def translated(
    sent: Mapping[str, Any],
    fields: Collection[str],
    prefix: str = "",
    passes: Collection[str] = (),
) -> Translation:
    """Translate the members of `sent` that are not in `fields`, the names of the body's own fields.

    `prefix` is written before names in errors, such as "options."; members named in `passes` are the caller's. Raises
    ApiError 400 for a refused field, a wrong value, and two unequal values of one setting.
    """
    made = Translation({}, [], {})
    for name in sent:
        if name in fields or name in HINTS or name in passes or _is_null(sent, name):
            continue
        row = FIELDS.get(name)
        if isinstance(row, Honoured):
            _honour(made, row, prefix + name, sent[name], sent, fields)
        elif isinstance(row, Refused) and (row.every_route or generates(fields)):
            if not row.is_off(sent[name], sent):
                raise invalid(
                    prefix + name, f"{prefix}{name}: {refused_value(sent[name])} is not supported; {row.advice}"
                )
        else:
            made.ignored.append(prefix + name)
    return made


def refused_value(value: Any) -> str:
    """A refused value in an error: itself, or the kind of an array or an object."""
    return quoted(value) if isinstance(value, str | int | float) else kind_of(value)


def generates(fields: Collection[str]) -> bool:
    """Whether a body with these fields asks for text."""
    return "temperature" in fields or "sampling_params" in fields


def _is_null(sent: Mapping[str, Any], name: str) -> bool:
    """Whether a value is null, which means absent; the value of an unknown name is not decoded."""
    return sent.is_null(name) if isinstance(sent, Members) else sent[name] is None


def _honour(
    made: Translation, row: Honoured, name: str, value: Any, sent: Mapping[str, Any], fields: Collection[str]
) -> None:
    try:
        settings = row.settings(value)
    except ValueError as error:
        raise invalid(name, f"{name}: got {quoted(value)}; must be {error}") from None
    for path, setting in settings.items():
        if path == "top_logprobs" and path not in fields and "logprobs" in fields:
            path = "logprobs"  # of completions: the number itself
        elif path == "top_logprobs" and "logprobs" in fields:
            made.settings["logprobs"] = True
        nests = "sampling_params" not in fields  # otherwise the body's own objects are no places for settings
        spellings = [
            each for each in SPELLINGS.get(path, (path,)) if root_of(each) in fields and (nests or "." not in each)
        ]
        if spellings:
            _set(made, spellings, setting, name, sent)
        elif generates(fields) and ("chat_template_kwargs" in fields or path not in OF_CHAT):
            way = "it in sampling_params" if "sampling_params" in fields else "the request to /v1/chat/completions"
            raise invalid(name, f"{name}: this route has no {path}; send {way}")
        else:
            made.ignored.append(name)
            return


def root_of(path: str) -> str:
    """The body's field of a path."""
    return path.partition(".")[0]


def _set(made: Translation, spellings: list[str], value: Any, name: str, sent: Mapping[str, Any]) -> None:
    """Set the first of the spellings, unless the body has the same value under any of them."""
    for path in spellings:
        root, _, key = path.partition(".")
        given = made.settings.get(root, sent.get(root))
        if key:
            given = given.get(key) if isinstance(given, dict) else None
        if given is not None:
            if given != value:
                raise invalid(name, f"{name}: contradicts {made.renamed.get(path, path)}; send one of them")
            return
    root, _, key = spellings[0].partition(".")
    outer = made.settings.get(root, sent.get(root))
    if key and isinstance(outer, dict | None):
        value = {**(outer or {}), key: value}
    elif key:
        return  # the decoder refuses the client's own value
    made.settings[root] = value
    made.renamed[spellings[0]] = name


@cache
def fields_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset((*kind.__struct_fields__, *COUNTED.get(kind, kind).__struct_fields__))


@cache
def known_names(kind: type[msgspec.Struct]) -> frozenset[bytes]:
    """Names that need no translation, as they are written in a body."""
    names = fields_of(kind) | HINTS
    return frozenset(name.encode() for name in (names - {NESTED[kind][0]} if kind in NESTED else names))


class Members(Mapping[str, Any]):
    """The members of a body's outermost object; a value is decoded when it is read."""

    def __init__(self, data: bytes) -> None:
        found = json_scan.members(data)
        if found is None:
            raise invalid(None, f"the body has more than {json_scan.MOST_MEMBERS} fields", "invalid_json")
        self._data = data
        self._places = {
            msgspec.json.decode(b'"%s"' % name, type=str) if b"\\" in name else name.decode(): (start, end)
            for name, start, end in found
        }

    def __getitem__(self, name: str) -> Any:
        start, end = self._places[name]
        text = memoryview(self._data)[start:end]
        if end - start > 2 * MOST_VALUES and json_scan.scan(text, end, MOST_VALUES)[0] != json_scan.OK:
            raise invalid(name, f"{name}: holds more than {MOST_VALUES} values")
        return msgspec.json.decode(text)

    def is_null(self, name: str) -> bool:
        start, end = self._places[name]
        return self._data[start : min(end, start + 5)].rstrip(_WHITE) == b"null"

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def translated_body(data: bytes, kind: type[msgspec.Struct]) -> tuple[bytes, Translation]:
    """The body with our fields at its end, where the decoder's last value of a name counts.

    Raises ApiError, or msgspec.DecodeError if the body is not JSON.
    """
    sent = Members(data)
    made = translated(sent, fields_of(kind))
    if kind in NESTED and isinstance(options := sent.get(NESTED[kind][0]), dict):
        name, inner = NESTED[kind]
        nested = translated(options, fields_of(inner), f"{name}.")
        made.ignored.extend(nested.ignored)
        made.renamed.update({f"{name}.{path}": each for path, each in nested.renamed.items()})
        made.renamed.update(nested.renamed)  # errors about sampling name the inner field alone
        if nested.settings:
            made.settings[name] = options | nested.settings
    whole = data.rstrip(_WHITE)
    if made.settings and whole.endswith(b"}"):
        data = b"%s,%s" % (whole[:-1], msgspec.json.encode(made.settings)[1:])
    return data, made


def report(exchange: Exchange, names: Collection[str], fields: Collection[str]) -> None:
    """Name ignored fields to the client and, once a minute each, in the log."""
    for name in _named(exchange, names):
        if lines.due(name):
            near = difflib.get_close_matches(name, (*fields, *FIELDS), n=1, cutoff=0.75)
            advice = f"; the nearest name is {near[0]}" if near else ""
            log.warning("the field %s of a request to %s is not known and was ignored%s", name, exchange.route, advice)


def report_tools(exchange: Exchange, kinds: Collection[str]) -> None:
    """Name tools that only other servers run to the client, as tools.KIND, and once a minute each in the log."""
    for name in _named(exchange, [f"tools.{kind}" for kind in dict.fromkeys(kinds)]):
        if lines.due(name):
            log.warning("%s of a request to %s runs at other servers only and was left out", name, exchange.route)


def _named(exchange: Exchange, names: Collection[str]) -> list[str]:
    """Add names to the header; returns them as they are written there."""
    written = [_UNPRINTABLE.sub("?", name[:NAME_LENGTH]) for name in list(names)[:MOST_NAMED]]
    headers = exchange.headers
    at = next((at for at, (name, _) in enumerate(headers) if name == HEADER), len(headers))
    before = headers[at][1].decode().split(", ") if at < len(headers) else []
    headers[at:] = [(HEADER, ", ".join([*before, *written][:MOST_NAMED]).encode()), *headers[at + 1 :]]
    return written


class Minutes:
    """Which names are due for a line of the log: each once a minute, MOST_LINES in all. Owner: loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def due(self, name: str) -> bool:
        now = self._clock()
        if name in self._last and now < self._last[name] + 60:
            return False
        if name not in self._last and len(self._last) >= MOST_LINES:
            self._last = {each: last for each, last in self._last.items() if now < last + 60}
            if len(self._last) >= MOST_LINES:
                return False
        self._last[name] = now
        return True


lines = Minutes()
