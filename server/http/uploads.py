"""Uploads: multipart/form-data, counted and parsed while it streams.

Owner: loop. In: ASGI messages. Out: a Form, its texts by name and one file; or 413, 415, 408, 400. Nothing is written
to disk, unless the caller gives a Sink for the file: the bytes count against the process-wide budget until the
`uploaded` block ends. A repeated field adds a value; the suffix [] of a list's name is dropped. The file grows in a
BytesIO, whose getvalue() returns its bytes without a copy: joining pieces of 100 MB held the GIL, and so blocked the
loop, for 63 ms.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from server.errors import ApiError, invalid
from server.flags.config import LimitsConfig
from server.http.exchange import state_of
from server.http.incoming import Incoming

CHUNK = 64 << 10  # bytes parsed in one turn of the loop
ALL_TEXTS = 4  # bytes of all texts of a form and the parts' headers, as a multiple of --max-form-field-bytes


@dataclass(slots=True)
class Form:
    """The uploaded form."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    file: io.BytesIO | None = None  # the file's content, if it has no sink
    filename: str | None = None  # the client's name of the file; None: there was no file


class Sink(Protocol):
    """A destination of the form's file other than memory."""

    advice: str  # for a file that is too large

    def write(self, data: memoryview) -> None:
        """Take a piece. Raises ApiError."""

    async def flush(self) -> None:
        """Bring the pieces to their place, if they are many. Raises ApiError."""


@asynccontextmanager
async def uploaded(
    request: Request, file_field: str, max_file_bytes: int, sink: Sink | None = None
) -> AsyncIterator[Form]:
    """The form of a request, in which only the field `file_field` may be a file; the sink gets the file's content.
    Raises ApiError.
    """
    limits = state_of(request).config.limits
    reader = FormReader(boundary_of(request), file_field, max_file_bytes, limits, sink)
    incoming = Incoming(request, max_file_bytes + ALL_TEXTS * limits.max_form_field_bytes, held=sink is None)
    try:
        while incoming.more:
            piece = await incoming.next()
            reader.feed(piece[:CHUNK])
            for start in range(CHUNK, len(piece), CHUNK):
                await asyncio.sleep(0)
                reader.feed(piece[start : start + CHUNK])
            if sink is not None:
                await sink.flush()
        yield reader.finished()
    finally:
        incoming.close()


def boundary_of(request: Request) -> bytes:
    """The boundary given in the content type."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise ApiError(415, "unsupported_media_type", "send the body as Content-Type: multipart/form-data")
    if not (boundary := options.get(b"boundary")):
        raise malformed("its content type names no boundary")
    return boundary


def malformed(why: str) -> ApiError:
    return invalid(None, f"the body is not valid multipart/form-data: {why}", "invalid_multipart")


class FormReader:
    """Parses one form as it arrives. Owner: loop."""

    def __init__(
        self, boundary: bytes, file_field: str, max_file_bytes: int, limits: LimitsConfig, sink: Sink | None = None
    ) -> None:
        self._form = Form()
        self._sink = sink
        self._file_field = file_field
        self._max_file = max_file_bytes
        self._limits = limits
        self._header = [bytearray(), bytearray()]  # name and value of the current header
        self._disposition = b""
        self._name = ""
        self._content = io.BytesIO()  # content of the current part
        self._size = 0
        self._is_file = False
        self._parts = 0
        self._texts_size = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
            )
        except FormParserError:
            raise malformed("its boundary is too long") from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError:
            raise malformed("a part does not begin or end as it should") from None

    def finished(self) -> Form:
        """The form, once all bytes have arrived."""
        if not self._ended:
            raise malformed("it is cut short")
        return self._form

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > self._limits.max_form_parts:
            raise malformed(f"it has more than {self._limits.max_form_parts} fields (--max-form-parts)")
        self._disposition, self._content, self._size = b"", io.BytesIO(), 0

    def _header_end(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        for part in self._header:
            part.clear()

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise malformed("a part has no name")
        self._name = options[b"name"].decode("utf-8", "replace").removesuffix("[]")
        self._is_file = self._name == self._file_field
        if b"filename" in options and not self._is_file:
            raise invalid(self._name[:64], f"{self._name[:64]}: is a file; the form's file is named {self._file_field}")
        if b"filename" not in options and self._is_file:
            text = f"{self._file_field}: is a text of the form; send it as a file, with a filename"
            raise ApiError(422, "invalid_parameter", text, self._file_field)
        if self._is_file:
            if self._form.filename is not None:
                raise invalid(self._file_field, f"{self._file_field}: came twice; send one file")
            self._form.filename = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._is_file and self._size > self._max_file:
            advice = "send shorter or compressed audio" if self._sink is None else self._sink.advice
            text = f"{self._file_field}: is larger than {self._max_file} bytes; {advice}"
            raise ApiError(413, "request_too_large", text, self._file_field)
        if not self._is_file:
            self._texts_size += end - start
            most = self._limits.max_form_field_bytes
            if self._size > most:
                raise malformed(f"a text has more than {most} bytes (--max-form-field-bytes)")
            if self._texts_size > ALL_TEXTS * most:
                raise malformed(f"its texts have more than {ALL_TEXTS * most} bytes together")
        into = self._sink if self._is_file and self._sink is not None else self._content
        into.write(memoryview(data)[start:end])

    def _end(self) -> None:
        if self._is_file:
            self._form.file = self._content if self._sink is None else None
            return
        try:
            self._form.texts.setdefault(self._name, []).append(self._content.getvalue().decode())
        except UnicodeDecodeError:
            raise invalid(self._name[:64], "a text of the form is not UTF-8") from None

    def _finish(self) -> None:
        self._ended = True
