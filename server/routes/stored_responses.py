"""/v1/responses/{id} (API.md section 11): retrieve, cancel and delete stored responses, and list their input items.

Owner: loop. In: the id of a response that the same key made. Out: the response's current state, or its events.
"""

from __future__ import annotations

import asyncio
import re

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answers.watch_response import WatchedResponse
from server.errors import invalid, not_found, quoted
from server.http.exchange import exchange_of
from server.http.watch import client_present
from server.output.response_store import Stored
from server.render.items import listed
from server.routes.endpoint import json_response, one_of, route

MOST_LISTED = 100
NUMBER = re.compile(r"-?[0-9]{1,9}\Z")


def missing(name: str) -> str:
    return f"there is no stored response {quoted(name)}"


def stored(request: Request) -> Stored:
    """The stored response; 404 for an id that is unknown, removed, or another key's."""
    exchange, name = exchange_of(request), request.path_params["id"]
    entry = exchange.state.responses.get(exchange.key_name, name)
    if entry is None:
        raise not_found(missing(name))
    return entry


def body_of(entry: Stored) -> Response:
    if entry.running is not None:
        return json_response(entry.running.snapshot())
    return Response(entry.body, media_type="application/json")


async def one(request: Request) -> Response | None:
    """GET and DELETE of a stored response."""
    return await (delete if request.method == "DELETE" else retrieve)(request)


async def retrieve(request: Request) -> Response | None:
    """The response's current state; with stream=true its events, optionally only those after `starting_after`."""
    query = request.query_params
    if query.get("stream", "false") not in ("true", "false"):
        raise invalid("stream", f"stream: got {quoted(query['stream'])}; must be true or false")
    after = query.get("starting_after", "-1")
    if not NUMBER.match(after):
        raise invalid("starting_after", f"starting_after: got {quoted(after)}; must be the number of an event")
    entry = stored(request)
    if query.get("stream") != "true":
        return body_of(entry)
    async with client_present(request):
        await WatchedResponse(exchange_of(request), entry.record, int(after) + 1).run()
    return None


async def cancel(request: Request) -> Response:
    """End a response in the background; an ended response does not change."""
    entry = stored(request)
    if entry.running is not None:
        await entry.running.cancel()
    elif not orjson.loads(entry.body)["background"]:
        raise invalid(None, "only a response that was made with background: true can be cancelled")
    return body_of(entry)


async def delete(request: Request) -> Response:
    entry = stored(request)
    exchange_of(request).state.responses.remove(entry)
    if entry.running is not None:
        await entry.running.cancel()
    return json_response({"id": entry.name, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """A page of the response's input items, including those of earlier turns; newest first."""
    query, entry = request.query_params, stored(request)
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    one_of("order", order, ("asc", "desc"))
    if not NUMBER.match(limit) or not 1 <= int(limit) <= MOST_LISTED:
        raise invalid("limit", f"limit: got {quoted(limit)}; must be 1 to {MOST_LISTED}")

    def page() -> bytes:
        items = listed(entry.turn.history(), entry.name.removeprefix("resp_"))
        if order == "desc":
            items.reverse()
        names = [item["id"] for item in items]
        if after is not None and after not in names:
            raise invalid("after", f"after: got {quoted(after)}; must be the id of one of this response's input items")
        begin = 0 if after is None else names.index(after) + 1
        some = items[begin : begin + int(limit)]
        ends = {"first_id": some[0]["id"], "last_id": some[-1]["id"]} if some else {"first_id": None, "last_id": None}
        return orjson.dumps({"object": "list", "data": some, **ends, "has_more": begin + len(some) < len(items)})

    content = await asyncio.get_running_loop().run_in_executor(exchange_of(request).state.pool, page)
    return Response(content, media_type="application/json")


ROUTES = [
    route("/v1/responses/{id}", one, "GET", "DELETE"),
    route("/v1/responses/{id}/cancel", cancel, "POST"),
    route("/v1/responses/{id}/input_items", input_items, "GET"),
]
