"""/v1/batches: make, list, retrieve and cancel batches of requests; server/batches runs them.

Owner: loop. In: the id of an uploaded file of the same key. Out: batch objects. A batch is answered at once with status
validating; its lines are checked and answered after that.
"""

from __future__ import annotations

import re
import time

from starlette.requests import Request
from starlette.responses import Response

from server.batches.lines import ENDPOINTS
from server.batches.records import BatchRecord, new_id
from server.errors import invalid, not_found, quoted
from server.http.body import read_json
from server.http.exchange import exchange_of, state_of
from server.routes.endpoint import json_response, one_of, route
from server.routes.files import check_seconds
from server.routes.paging import page_of
from server.schema.batches import BatchBody

USUAL_LISTED, MOST_LISTED = 20, 100
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
WINDOW = re.compile(r"([1-9][0-9]{0,2})h\Z")
MOST_HOURS = 168


async def batches(request: Request) -> Response | None:
    """GET and POST of the list."""
    return await (create if request.method == "POST" else listed)(request)


async def create(request: Request) -> Response:
    """Make a batch of a file's lines."""
    exchange = exchange_of(request)
    state = exchange.state
    body = await read_json(request, BatchBody, state.config.limits.max_text_request_bytes)
    one_of("endpoint", body.endpoint, ENDPOINTS)
    file = state.batches.files.get(exchange.key_name, body.input_file_id)
    if file is None:
        raise not_found(f"there is no file {quoted(body.input_file_id)}", "input_file_id")
    if file.purpose != "batch":
        raise invalid("input_file_id", "input_file_id: is the output of a batch; name a file with purpose batch")
    if (expiry := body.output_expires_after) is not None:
        one_of("output_expires_after.anchor", expiry.anchor, ("created_at",))
        check_seconds("output_expires_after.seconds", expiry.seconds)
    check_metadata(body.metadata)
    now = int(time.time())
    record = BatchRecord(
        id=new_id("batch_"),
        key=exchange.key_name,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + 3600 * hours_of(body.completion_window),
        outputs=new_id("file-"),
        errors=new_id("file-"),
        metadata=body.metadata,
        output_seconds=None if expiry is None else expiry.seconds,
    )
    await state.batches.add(record)
    return json_response(record.public())


def hours_of(window: str) -> int:
    found = WINDOW.match(window)
    hours = int(found[1]) if found else 0
    if not 1 <= hours <= MOST_HOURS:
        text = f"completion_window: got {quoted(window)}; must be 24h, or other hours from 1h to {MOST_HOURS}h"
        raise invalid("completion_window", text)
    return hours


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    long = any(len(key) > LONGEST_KEY or len(value) > LONGEST_VALUE for key, value in metadata.items())
    if len(metadata) > MOST_METADATA or long:
        text = f"metadata: has at most {MOST_METADATA} texts of {LONGEST_VALUE} characters under keys of {LONGEST_KEY}"
        raise invalid("metadata", text)


def found(request: Request) -> BatchRecord:
    """The batch of the path; 404 for an id that is unknown, forgotten, or another key's."""
    exchange, name = exchange_of(request), request.path_params["id"]
    record = exchange.state.batches.get(exchange.key_name, name)
    if record is None:
        raise not_found(f"there is no batch {quoted(name)}")
    return record


async def listed(request: Request) -> Response:
    """A page of the key's batches."""
    exchange = exchange_of(request)
    records = exchange.state.batches.listed(exchange.key_name)
    return json_response(page_of(request, records, USUAL_LISTED, MOST_LISTED))


async def retrieve(request: Request) -> Response:
    """The current state of a batch."""
    return json_response(found(request).public())


async def cancel(request: Request) -> Response:
    """End a batch; an ended batch does not change."""
    record = found(request)
    await state_of(request).batches.cancel(record)
    return json_response(record.public())


ROUTES = [
    route("/v1/batches", batches, "GET", "POST"),
    route("/v1/batches/{id}", retrieve, "GET"),
    route("/v1/batches/{id}/cancel", cancel, "POST"),
]
