"""Lines: the requests of a batch's file, checked one by one before the first of them runs.

Thread: the pool reads and checks. In: a JSONL file. Out: lines in order, or what is wrong with them, by line. Memory is
bounded: a line has a largest length, and of the other lines only the ids are held.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from server.batches.records import Problem
from server.errors import quoted

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/decisions")
MOST_LINES = 50_000
MOST_PROBLEMS = 100  # problems that a batch reports
MOST_ID = 256  # characters of a custom_id
UTF8_MARK = b"\xef\xbb\xbf"


class Line(msgspec.Struct):
    """A request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Asked(msgspec.Struct):
    """The fields of a body that a batch looks at."""

    model: str | None = None
    stream: bool | None = None
    background: bool | None = None


@dataclass(slots=True)
class Rules:
    """What the lines of a file must be. `url`: of all lines; "": each line has one of ENDPOINTS."""

    url: str
    unknown_model: Callable[[str | None], str]  # why a model is not served; "": it is
    max_bytes: int  # of a line


@dataclass(slots=True)
class Checked:
    """The result of a check."""

    total: int = 0
    model: str | None = None  # of the first line
    problems: list[Problem] = field(default_factory=list)

    def add(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(Problem(code=code, message=message, line=line, param=param))


def check_lines(path: Path, rules: Rules) -> Checked:
    """Check every line of a file. Raises OSError."""
    found, seen = Checked(), set[str]()
    with path.open("rb") as file:
        for number, data in raw_lines(file, rules.max_bytes):
            found.total += 1
            if found.total > MOST_LINES:
                found.add("too_many_lines", f"the file has more than {MOST_LINES} lines; split it into several batches")
                return found
            if len(data) > rules.max_bytes:
                found.add("line_too_long", f"the line is longer than {rules.max_bytes} bytes", number)
                continue
            check_line(data, number, rules, seen, found)
    if not found.total:
        found.add("empty_file", "the file has no lines; write a request in each line")
    return found


def check_line(data: bytes, number: int, rules: Rules, seen: set[str], found: Checked) -> None:
    """Check one line, and that its id is not among those `seen`."""
    try:
        line = msgspec.json.decode(data, type=Line)
        asked = msgspec.json.decode(line.body, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        got = quoted(data[:64].decode("utf-8", "replace").strip())
        text = f"the line is no JSON object with the texts custom_id, method, url and the object body; it begins {got}"
        found.add("invalid_json_line", text, number)
        return
    if found.model is None:
        found.model = asked.model
    if not 1 <= len(line.custom_id) <= MOST_ID:
        found.add("invalid_custom_id", f"custom_id: must have 1 to {MOST_ID} characters", number, "custom_id")
    elif line.custom_id in seen:
        text = f"custom_id: {quoted(line.custom_id)} is the id of an earlier line; give each line its own"
        found.add("duplicate_custom_id", text, number, "custom_id")
    seen.add(line.custom_id)
    if line.method != "POST":
        found.add("invalid_method", f"method: got {quoted(line.method)}; must be POST", number, "method")
    if line.url not in ((rules.url,) if rules.url else ENDPOINTS):
        wanted = f"{rules.url}, the batch's endpoint" if rules.url else "one of " + ", ".join(ENDPOINTS)
        found.add("mismatched_url", f"url: got {quoted(line.url)}; must be {wanted}", number, "url")
    for name in ("stream", "background"):
        if getattr(asked, name):
            found.add("invalid_body", f"body.{name}: a batch has whole answers; leave it out", number, f"body.{name}")
    if why := rules.unknown_model(asked.model):
        found.add("model_not_found", f"body.{why}", number, "body.model")


def raw_lines(file: io.BufferedReader, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not empty; of a longer line the first max_bytes + 1 bytes."""
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        if number == 1:
            data = data.removeprefix(UTF8_MARK)
        rest = data
        while len(rest) > max_bytes and not rest.endswith(b"\n"):
            rest = file.readline(max_bytes + 1)
        if data.strip():
            yield number, data


class LineReader:
    """The lines of a checked file, a few at a time, without those whose id is among `done`."""

    def __init__(self, path: Path, max_bytes: int, done: set[str]) -> None:
        """Raises OSError."""
        self._file = path.open("rb")
        lines = (msgspec.json.decode(data, type=Line) for _, data in raw_lines(self._file, max_bytes))
        self._lines = (line for line in lines if line.custom_id not in done)

    def next(self, count: int) -> list[Line]:
        """The next lines; an empty list at the end."""
        return list(islice(self._lines, count))

    def close(self) -> None:
        self._file.close()
