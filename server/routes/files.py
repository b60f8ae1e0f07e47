"""/v1/files: upload, list, retrieve, read and delete files of requests for batches, and outputs of batches.

Owner: loop. In: a form with a file, or the id of a file of the same key. Out: file objects, or the content in pieces.
An upload goes to the disk while it arrives.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import PurePosixPath

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.batches.files import Files
from server.batches.records import FileRecord
from server.batches.upload import Upload
from server.errors import from_validation, invalid, not_found, quoted
from server.http.exchange import exchange_of, state_of
from server.http.uploads import Form, uploaded
from server.routes.endpoint import json_response, one_of, route
from server.routes.paging import page_of
from server.schema.files import FileForm

PIECE = 1 << 18  # bytes that one read of a content returns
MOST_LISTED = 10_000
LONGEST_NAME = 255  # characters of a file's name
TIMES = (3600, 30 * 24 * 3600)  # seconds of `expires_after`, least and most


async def files(request: Request) -> Response | None:
    """GET and POST of the list."""
    return await (create if request.method == "POST" else listed)(request)


async def one(request: Request) -> Response | None:
    """GET and DELETE of a file."""
    return await (delete if request.method == "DELETE" else retrieve)(request)


async def create(request: Request) -> Response:
    """Store a file."""
    exchange = exchange_of(request)
    state = exchange.state
    most = state.config.batches.max_batch_file_bytes
    async with (
        Upload(state.batches.files, exchange.key_name, exchange.client) as upload,
        uploaded(request, "file", most, upload) as form,
    ):
        fields = typed(form)
        if form.filename is None or not upload.size:
            raise invalid("file", "file: is missing or empty; send the requests as the form's file")
        now = int(time.time())
        record = FileRecord(
            id=upload.id,
            key=exchange.key_name,
            filename=name_of(form.filename),
            purpose="batch",
            bytes=upload.size,
            created_at=now,
            expires_at=None if fields.seconds is None else now + fields.seconds,
        )
        await upload.store(record)
    exchange.details["bytes"] = record.bytes
    return json_response(record.public())


def typed(form: Form) -> FileForm:
    """The form's texts as fields. Raises ApiError."""
    for name, values in form.texts.items():
        if len(values) > 1:
            raise invalid(name[:64], f"{name[:64]}: came {len(values)} times; send it once")
    try:
        fields = msgspec.convert({name: values[0] for name, values in form.texts.items()}, FileForm, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    one_of("purpose", fields.purpose, ("batch",))
    one_of("expires_after[anchor]", fields.anchor, ("created_at",))
    check_seconds("expires_after[seconds]", fields.seconds)
    return fields


def check_seconds(name: str, seconds: int | None) -> None:
    least, most = TIMES
    if seconds is not None and not least <= seconds <= most:
        raise invalid(name, f"{name}: got {seconds}; must be {least} to {most}")


def name_of(sent: str) -> str:
    """The client's name of a file without folders and control characters."""
    name = PurePosixPath(sent.replace("\\", "/")).name[:LONGEST_NAME]
    return "".join(letter if letter.isprintable() else "?" for letter in name) or "file"


def found(request: Request) -> FileRecord:
    """The file of the path; 404 for an id that is unknown, deleted, or another key's."""
    exchange, name = exchange_of(request), request.path_params["id"]
    record = exchange.state.batches.files.get(exchange.key_name, name)
    if record is None:
        raise not_found(f"there is no file {quoted(name)}")
    return record


async def listed(request: Request) -> Response:
    """A page of the key's files."""
    exchange, purpose = exchange_of(request), request.query_params.get("purpose")
    one_of("purpose", purpose, ("batch", "batch_output"))
    records = exchange.state.batches.files.listed(exchange.key_name)
    some = records if purpose is None else [record for record in records if record.purpose == purpose]
    return json_response(page_of(request, some, MOST_LISTED, MOST_LISTED))


async def retrieve(request: Request) -> Response:
    """The facts about a file."""
    return json_response(found(request).public())


async def delete(request: Request) -> Response:
    """Delete a file."""
    record, stored = found(request), state_of(request).batches
    if (batch := stored.reader_of(record.id)) is not None:
        raise invalid(None, f"batch {batch.id} still reads this file; cancel the batch, or wait for its end")
    await stored.files.remove(record)
    return json_response({"id": record.id, "object": "file", "deleted": True})


async def content(request: Request) -> Response:
    """The bytes of a file."""
    record = found(request)
    headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
    pieces = read(state_of(request).batches.files, record)
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


async def read(store: Files, record: FileRecord) -> AsyncIterator[bytes]:
    """The content in pieces; an open file stays readable after its deletion."""
    file = await store.on_disk(lambda: store.place_of(record.id).open("rb", buffering=0))
    try:
        sent = 0
        while sent < record.bytes:
            piece = await store.on_disk(partial(file.read, min(PIECE, record.bytes - sent)))
            if not piece:
                raise RuntimeError("a stored file is shorter than its record says")
            sent += len(piece)
            yield piece
    finally:
        file.close()


ROUTES = [
    route("/v1/files", files, "GET", "POST"),
    route("/v1/files/{id}", one, "GET", "DELETE"),
    route("/v1/files/{id}/content", content, "GET"),
]
